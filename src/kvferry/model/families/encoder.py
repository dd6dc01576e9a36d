"""Families with cross attention: its K and V are computed once from the encoder and never grow."""

from __future__ import annotations

from kvferry.model.families.heads import head_shape
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__: list[str] = []


def _decoder(num_layers: int, heads: int, width: int, encoder_tokens: int | None = None) -> FamilyShape:
    layers = range(num_layers)
    return FamilyShape(
        num_layers,
        (
            heads_group(LayerKind.FULL, layers, Heads(heads, width, width)),
            heads_group(LayerKind.CROSS, layers, Heads(heads, width, width)),
        ),
        encoder_tokens=encoder_tokens,
    )


@family("whisper")
def whisper(f: Fields) -> FamilyShape:
    """Whisper: the encoder always gives ``max_source_positions`` vectors (1500 in its class)."""
    heads = f.count("decoder_attention_heads")
    width = f.count("d_model") // heads
    tokens = f.optional("max_source_positions") or 1500
    return _decoder(f.count("decoder_layers"), heads, width, tokens)


@family("bart", "mbart", "m2m_100", "pegasus", "marian", "blenderbot", "plbart", "nllb-moe")
def bart(f: Fields) -> FamilyShape:
    """BART and its kin; the encoder's length is the request's."""
    heads = f.count("decoder_attention_heads")
    return _decoder(f.count("decoder_layers"), heads, f.count("d_model") // heads)


@family("t5", "mt5", "umt5", "longt5", "switch_transformers")
def t5(f: Fields) -> FamilyShape:
    """T5: ``d_kv * num_heads`` is the width, not ``d_model`` (t5-11b: 16384 against 1024)."""
    return _decoder(f.count("num_decoder_layers", "num_layers"), f.count("num_heads"), f.count("d_kv"))


@family("mllama_text_model", "mllama")
def mllama(f: Fields) -> FamilyShape:
    """Llama 3.2 Vision: ``cross_attention_layers`` attend to the image only, the others to the text only."""
    num_layers = layer_count(f)
    cross = f.counts("cross_attention_layers")
    if cross is None or any(i >= num_layers for i in cross):
        raise f.error("cross_attention_layers", f"layer indices below {num_layers} are needed")
    own = sorted(set(range(num_layers)) - set(cross))
    shape = head_shape(f)
    groups = (heads_group(LayerKind.FULL, own, shape), heads_group(LayerKind.CROSS, sorted(cross), shape))
    return FamilyShape(num_layers, groups)

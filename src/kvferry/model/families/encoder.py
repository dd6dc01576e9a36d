"""Families with cross attention: its K and V are computed once from the encoder and never grow."""

from __future__ import annotations

from kvferry.model.families.heads import head_shape, head_width
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__: list[str] = []

# Of the encoder, which keeps nothing once it has run, and of the decoder's MLPs.
_ENCODER = (
    "decoder_ffn_dim",
    "decoder_layerdrop",
    "encoder_attention_heads",
    "encoder_attention_type",
    "encoder_ffn_dim",
    "encoder_layerdrop",
    "encoder_layers",
    "encoder_sparse_step",
    "global_block_size",
    "is_encoder_decoder",
    "local_radius",
    "num_hidden_layers",
    "num_sparse_decoder_layers",
    "num_sparse_encoder_layers",
    "scalable_attention",
    "scale_decoder_outputs",
    "share_encoder_decoder_embeddings",
)


def _decoder(
    f: Fields, num_layers: int, heads: int, width: int, encoder_tokens: int | None = None
) -> FamilyShape:
    f.understands(*_ENCODER)
    shape = Heads(heads, width, width, heads)
    layers = range(num_layers)
    return FamilyShape(
        num_layers,
        (heads_group(LayerKind.FULL, layers, shape), heads_group(LayerKind.CROSS, layers, shape)),
        encoder_tokens=encoder_tokens,
    )


@family("whisper")
def whisper(f: Fields) -> FamilyShape:
    """Whisper: the encoder always gives ``max_source_positions`` vectors (1500 in its class)."""
    heads = f.count("decoder_attention_heads")
    width = head_width(f, heads, "d_model")
    tokens = f.optional("max_source_positions") or 1500
    return _decoder(f, f.count("decoder_layers"), heads, width, tokens)


@family("bart", "mbart", "m2m_100", "pegasus", "marian", "blenderbot", "plbart", "nllb-moe")
def bart(f: Fields) -> FamilyShape:
    """BART and its kin; the encoder's length is the request's."""
    heads = f.count("decoder_attention_heads")
    return _decoder(f, f.count("decoder_layers"), heads, head_width(f, heads, "d_model"))


@family("t5", "mt5", "umt5", "longt5", "switch_transformers")
def t5(f: Fields) -> FamilyShape:
    """T5: ``d_kv * num_heads`` is the width, not ``d_model`` (t5-11b: 16384 against 1024)."""
    layers = f.optional("num_decoder_layers")  # where it is missing, as many as the encoder has
    num_layers = f.count("num_layers") if layers is None else layers
    f.understands("num_layers")
    return _decoder(f, num_layers, f.count("num_heads"), f.count("d_kv"))


@family("mllama_text_model", "mllama")
def mllama(f: Fields) -> FamilyShape:
    """Llama 3.2 Vision: ``cross_attention_layers`` attend to the image only, the others to the text only."""
    num_layers = layer_count(f)
    cross = f.indices("cross_attention_layers", num_layers)
    if cross is None:
        raise f.error("cross_attention_layers", "missing from the config")
    own = sorted(set(range(num_layers)) - set(cross))
    shape = head_shape(f)
    groups = (heads_group(LayerKind.FULL, own, shape), heads_group(LayerKind.CROSS, cross, shape))
    return FamilyShape(num_layers, groups)

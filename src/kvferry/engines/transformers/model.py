"""A transformers model as the engine runs it: one forward, the form of its cache, and who it is."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from kvferry.engines.text import NoTokenizer, Tokenizer
from kvferry.engines.transformers.form import CacheForm
from kvferry.engines.transformers.staging import raw_bytes
from kvferry.errors import InputError, LocalError
from kvferry.layout import PoolLayout, Role
from kvferry.state import Fingerprint, config_digest, probe_digest, probe_token_ids, weights_digest

__all__ = ["Identity", "ModelCache", "TransformersModel"]

ENGINE = "transformers"
_UNBOUNDED = 1 << 20  # tokens, for a model that states no limit
_CONTEXT = ("max_position_embeddings", "max_target_positions", "n_positions")
# Not of the model: where it came from, and which library wrote it.
_FOREIGN = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model that another engine loaded from the same file, where this one could not know them.

    ``interleaved_keys``: the other engine pairs neighbours in its rotary embedding (as GGUF has
    Llama), transformers the two halves. Keys are then stored in the pool in the other's order.
    """

    weights: str
    config: str
    interleaved_keys: bool = False


@dataclass(slots=True, eq=False)
class ModelCache:
    """What one request holds: the cache, and for an encoder-decoder model what the encoder said."""

    layers: list[Any]
    cross: list[Any]
    cache: Any
    encoded: torch.Tensor | None = None
    encoder_digest: str = ""
    draft: ModelCache | None = None  # the draft model's, in assisted decoding

    @property
    def cross_tokens(self) -> int:
        """Tokens of the encoder."""
        return 0 if self.encoded is None else int(self.encoded.shape[1])


class TransformersModel:
    """A causal or encoder-decoder model on the CPU, in evaluation mode.

    Args:
        model: loaded, with the attention implementation that it will serve with.
        tokenizer: for text and stop strings; without one, ids come in and ids go out.
        identity: see ``Identity``; None: digests of the model's own tensors and configuration.
        max_context: tokens; None: what the configuration says.

    Runs the numerics probe at once: 24 tokens and a step. Raises LocalError for a model that is not
    on the CPU, or whose cache holds what kvferry does not know, naming it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Tokenizer | None = None,
        identity: Identity | None = None,
        max_context: int | None = None,
    ) -> None:
        if model.device.type != "cpu":
            raise LocalError(f"the transformers engine runs on the CPU, this model is on {model.device}")
        if model.training:
            raise LocalError("the model is in training mode: its dropout would change every token")
        self.model = model
        self.config = model.config
        text_config = model.config.get_text_config(decoder=True)
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.vocab_size = int(text_config.vocab_size)
        self.max_context = max_context or _stated_context(text_config)
        self.tokenizer = tokenizer or NoTokenizer(_stop_ids(model))
        self.identity = identity or Identity(_weights(model), _config(model.config))
        self._latent_dim = getattr(text_config, "kv_lora_rank", None)
        self.form, self.cross_form, self.probe = self._fill()

    def fingerprint(self) -> Fingerprint:
        """Who this is, for the comparison of a pair."""
        kernel = getattr(self.config, "_attn_implementation", None)
        libraries = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return Fingerprint(
            engine=ENGINE,
            build=f"{libraries}, {torch.backends.cpu.get_cpu_capability()}, {kernel} attention",
            weights=self.identity.weights,
            config=self.identity.config,
            tokenizer=self.tokenizer.digest,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            probe=self.probe,
        )

    def layout(
        self, *, tokens: int, requests: int = 16, block_size: int = 16, encoder_tokens: int = 0
    ) -> PoolLayout:
        """A pool for handoffs of ``tokens`` tokens and ``requests`` requests in flight together."""
        form = self.form.beside(self.cross_form)
        return form.layout(
            tokens=tokens, requests=requests, block_size=block_size, encoder_tokens=encoder_tokens
        )

    @property
    def key_order(self) -> torch.Tensor | None:
        """Element of a key in the pool -> element in transformers; None where they are the same."""
        if not self.identity.interleaved_keys:
            return None
        widths = {tensor.width for tensor in self.form.tensors if tensor.held.role is Role.KEY}
        (width,) = widths
        return torch.arange(width).reshape(2, width // 2).T.reshape(-1)

    def encode(self, encoder_input: torch.Tensor) -> torch.Tensor:
        """The encoder's output, (1, tokens, hidden)."""
        with torch.inference_mode():
            output = self.model.get_encoder()(encoder_input)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def new_cache(self, encoder_input: torch.Tensor | None = None) -> ModelCache:
        """An empty cache; with the encoder's output, where there is an encoder.

        Raises InputError where an input is missing, or is too many.
        """
        if self.is_encoder_decoder != (encoder_input is not None):
            raise InputError(
                "encoder_input: "
                + ("missing" if self.is_encoder_decoder else "given")
                + ", but this model "
                + ("has an encoder" if self.is_encoder_decoder else "has no encoder")
            )
        if encoder_input is None:
            own = DynamicCache(config=self.config)
            return ModelCache(own.layers, [], own)
        both = EncoderDecoderCache(DynamicCache(), DynamicCache())
        digest = hashlib.sha256(raw_bytes(encoder_input)).hexdigest()
        return ModelCache(
            both.self_attention_cache.layers,
            both.cross_attention_cache.layers,
            both,
            self.encode(encoder_input),
            digest,
        )

    def filled_cache(
        self, layers: list[Any], cross: list[Any], cross_tokens: int, encoder_digest: str
    ) -> ModelCache:
        """A cache object around layers that were built elsewhere.

        Of the encoder's output only the length is needed: the cross attention's keys and values are there.
        """
        own = copy.copy(self._own_template)
        own.layers = layers
        if not self.is_encoder_decoder:
            return ModelCache(layers, [], own)
        other = copy.copy(self._own_template)
        other.layers = cross
        hidden = torch.zeros((1, cross_tokens, self._encoder_width), dtype=self.model.dtype)
        return ModelCache(layers, cross, EncoderDecoderCache(own, other), hidden, encoder_digest)

    def forward(self, held: ModelCache, ids: Sequence[int], *, every_row: bool = False) -> torch.Tensor:
        """Run ids after what the cache holds. Logits, float32: (1, vocab_size), or a row an id."""
        inputs = torch.tensor([list(ids)], dtype=torch.long)
        keep = {} if every_row or not self._keeps_logits else {"logits_to_keep": 1}
        with torch.inference_mode():
            if held.encoded is None:
                output = self.model(input_ids=inputs, cache=held.cache, use_cache=True, **keep)
            else:
                output = self.model(
                    decoder_input_ids=inputs,
                    encoder_outputs=(held.encoded,),
                    cache=held.cache,
                    use_cache=True,
                )
        logits: torch.Tensor = output.logits[0].to(dtype=torch.float32, copy=True)
        return logits if every_row else logits[-1:]

    @property
    def _keeps_logits(self) -> bool:
        return self.model._supports_logits_to_keep()  # noqa: SLF001 - what generate asks, too

    def _fill(self) -> tuple[CacheForm, CacheForm, str]:
        """Run the numerics probe, and read the form of the cache off what it left."""
        probe, held = probe_token_ids(self.vocab_size), self.new_cache(self._probe_input())
        rows = self.forward(held, probe.prefill.tolist(), every_row=True)
        step = self.forward(held, [probe.step], every_row=True)
        digest = probe_digest([*rows.numpy(), *step.numpy()])
        own = held.cache.self_attention_cache if self.is_encoder_decoder else held.cache
        self._own_template = own
        self._encoder_width = 0 if held.encoded is None else int(held.encoded.shape[-1])
        tokens = len(probe.prefill) + 1
        slowest = max((getattr(layer, "compress_rate", 1) for layer in held.layers), default=1)
        if slowest > tokens:  # so long that every layer has made an entry
            held, tokens = self.new_cache(self._probe_input()), slowest
            self.forward(held, (probe.prefill.tolist() * slowest)[:slowest])
        form = CacheForm.of(tuple(held.layers), tokens, latent_dim=self._latent_dim)
        cross = CacheForm.of(tuple(held.cross), held.cross_tokens, is_cross=True)
        return form, cross, digest

    def _probe_input(self) -> torch.Tensor | None:
        if not self.is_encoder_decoder:
            return None
        probe = probe_token_ids(self.vocab_size)
        if self.model.main_input_name == "input_ids":
            return torch.from_numpy(probe.prefill.copy()).long()[None]
        if self.model.main_input_name == "input_features":
            bins, frames = self.config.num_mel_bins, 2 * self.config.max_source_positions
            ramp = torch.linspace(-1.0, 1.0, bins * frames, dtype=torch.float32)
            return torch.sin(1000 * ramp).reshape(1, bins, frames).to(self.model.dtype)
        raise LocalError(
            f"main_input_name: {self.model.main_input_name!r}; known are input_ids and input_features"
        )


def _stated_context(config: Any) -> int:
    stated = [getattr(config, name, None) for name in _CONTEXT]
    return next((int(value) for value in stated if value), _UNBOUNDED)


def _stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return tuple(int(token) for token in ids if token is not None)


def _weights(model: PreTrainedModel) -> str:
    return weights_digest(
        (name, str(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
        for name, tensor in model.state_dict().items()
    )


def _config(config: Any) -> str:
    """Digest of every hyper-parameter; infinities, which JSON lacks, by their names."""
    fields = json.loads(config.to_json_string(use_diff=False), parse_constant=str)
    return config_digest({key: value for key, value in fields.items() if key not in _FOREIGN})

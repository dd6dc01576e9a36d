"""llama.cpp through its C interface: one model, one context, sequences by number. Nothing else calls it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError, LocalError

__all__ = ["Context", "ContextOptions"]

_TROUBLE = (3, 4)  # GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR
_KINDS = {"float32": 0, "float16": 1, "q8_0": 8, "bfloat16": 30}  # enum ggml_type


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What decides numbers and room. ``context_tokens``: of each of ``sequences`` sequences.

    ``flash_attention`` False stores values transposed. ``rope_freq_base`` 0: the model's own.
    """

    context_tokens: int = 1024
    sequences: int = 4
    threads: int = 1
    batch_tokens: int = 512
    key_type: str = "float16"
    value_type: str = "float16"
    flash_attention: bool = True
    rope_freq_base: float = 0.0


class Context:
    """Owns the model and its memory until ``close``. Raises LocalError where the file cannot be loaded."""

    def __init__(self, path: str, options: ContextOptions) -> None:
        self.options = options
        lib.llama_log_set(_on_log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise LocalError(f"{path}: llama.cpp cannot load it: {_last_words()}")
        self._context = lib.llama_init_from_model(self._model, _parameters(options))
        if not self._context:
            lib.llama_model_free(self._model)
            raise LocalError(f"{path}: llama.cpp makes no context with {options}: {_last_words()}")
        self._memory = lib.llama_get_memory(self._context)
        self.vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.window = int(lib.llama_model_n_swa(self._model)) or None
        self.is_recurrent = bool(lib.llama_model_is_recurrent(self._model))
        self.is_hybrid = bool(lib.llama_model_is_hybrid(self._model))
        self.train_tokens = int(lib.llama_model_n_ctx_train(self._model))

    def decode(
        self, sequence: int, ids: Sequence[int], position: int, *, every_row: bool = False
    ) -> NDArray[np.float32]:
        """Run ids after what the sequence holds. Logits, float32: (1, vocab_size), or a row an id.

        Raises CapacityError where the memory has no room, LocalError for any other refusal.
        """
        most = self.options.batch_tokens
        rows = [
            self._decode(sequence, ids[at : at + most], position + at, every_row, at + most >= len(ids))
            for at in range(0, len(ids), most)
        ]
        return np.concatenate([row for row in rows if row is not None])

    def _decode(
        self, sequence: int, ids: Sequence[int], position: int, every_row: bool, last: bool
    ) -> NDArray[np.float32] | None:
        batch = lib.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for at, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, position + at
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = every_row or (last and at == len(ids) - 1)
            result = lib.llama_decode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if result == 1:
            raise CapacityError(
                "llama.cpp has no room for these tokens", now_true="the sequence is as it was"
            )
        if result != 0:
            raise LocalError(f"llama_decode at position {position}: {result}: {_last_words()}")
        outputs = range(len(ids)) if every_row else [-1] if last else []
        found = [lib.llama_get_logits_ith(self._context, at) for at in outputs]
        if not found:
            return None
        return np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)).copy() for row in found])

    def write_out(self, sequence: int) -> NDArray[np.uint8]:
        """The bytes that llama.cpp writes for a sequence. Raises LocalError where it does not."""
        nbytes = lib.llama_state_seq_get_size_ext(self._context, sequence, 0)
        data = np.empty(nbytes, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = lib.llama_state_seq_get_data_ext(self._context, pointer, nbytes, sequence, 0)
        if written != nbytes or nbytes == 0:
            raise LocalError(f"llama.cpp wrote {written} of {nbytes} bytes of a sequence: {_last_words()}")
        return data

    def read_in(self, sequence: int, data: NDArray[np.uint8]) -> int:
        """Set an empty sequence from bytes of ours; returns the bytes that llama.cpp says it took."""
        pointer = np.ascontiguousarray(data).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return int(lib.llama_state_seq_set_data_ext(self._context, pointer, len(data), sequence, 0))

    def span(self, sequence: int) -> tuple[int, int] | None:
        """First and last position of a sequence; None when it is empty."""
        last = int(lib.llama_memory_seq_pos_max(self._memory, sequence))
        return None if last < 0 else (int(lib.llama_memory_seq_pos_min(self._memory, sequence)), last)

    def clear(self, sequence: int) -> None:
        """Forget a sequence."""
        lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def close(self) -> None:
        """Free context and model. Safe to call twice."""
        if self._context:
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)
            self._context = self._model = None


_words: deque[str] = deque(maxlen=4)


def _note(level: int, text: bytes, _data: Any) -> None:
    if level in _TROUBLE:
        _words.append(text.decode("utf-8", "replace").strip())


# One for the process and for good: the library has one place for it, and calls it from any context.
_on_log = lib.llama_log_callback(_note)


def _last_words() -> str:
    return " / ".join(_words) or "it did not say why"


def _parameters(options: ContextOptions) -> Any:
    unknown = {options.key_type, options.value_type} - _KINDS.keys()
    if unknown:
        raise LocalError(f"cache types {', '.join(sorted(unknown))}: known are {', '.join(_KINDS)}")
    given = lib.llama_context_default_params()
    given.n_ctx = options.context_tokens * options.sequences
    given.n_seq_max = options.sequences
    given.n_batch = given.n_ubatch = options.batch_tokens
    given.n_threads = given.n_threads_batch = options.threads
    given.type_k, given.type_v = _KINDS[options.key_type], _KINDS[options.value_type]
    given.flash_attn_type = int(options.flash_attention)
    given.rope_freq_base = options.rope_freq_base
    # A stream a sequence: where a sequence's cells lie then does not depend on the others.
    given.kv_unified = False
    given.swa_full = False
    return given

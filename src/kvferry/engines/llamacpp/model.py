"""A GGUF model in llama.cpp: the context, who it is, and the form of its sequence state."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import llama_cpp
import numpy as np

from kvferry.engines.gguf import gguf_weights, open_gguf
from kvferry.engines.llamacpp.blob import Attention, Part, Recurrent, build, parse
from kvferry.engines.llamacpp.context import Context, ContextOptions
from kvferry.engines.llamacpp.form import SequenceForm
from kvferry.engines.text import NoTokenizer, Tokenizer
from kvferry.errors import KVFerryError, LocalError
from kvferry.layout import PoolLayout
from kvferry.state import Fingerprint, config_digest, probe_digest, probe_token_ids

__all__ = ["LlamaCppModel"]

ENGINE = "llama.cpp"


class LlamaCppModel:
    """Owns the context until ``close``.

    Args:
        path: a GGUF file.
        options: what decides numbers and room.
        tokenizer: for text and stop strings; without one, ids come in and ids go out.

    Runs the numerics probe at once, and takes the state that it left apart and together again:
    where that does not give the same bytes, this llama.cpp writes another form, and LocalError is
    raised. So it is for a model whose cells carry more than a position (M-RoPE).
    """

    def __init__(
        self, path: Path, options: ContextOptions | None = None, *, tokenizer: Tokenizer | None = None
    ) -> None:
        self.options = options or ContextOptions()
        self.context = Context(str(path), self.options)
        try:
            self.tokenizer = tokenizer or NoTokenizer()
            self.vocab_size = self.context.vocab_size
            self.max_context = min(self.options.context_tokens, self.context.train_tokens)
            self.memories = _memories(self.context)
            self.probe, template = self._fill()
            self.form = SequenceForm(template, self.context.window)
            self._fingerprint = self._read_identity(path)
        except BaseException:
            self.context.close()
            raise

    def fingerprint(self) -> Fingerprint:
        """Who this is, for the comparison of a pair."""
        return self._fingerprint

    def layout(self, *, tokens: int, requests: int = 16, block_size: int = 16) -> PoolLayout:
        """A pool for handoffs of ``tokens`` tokens and ``requests`` requests in flight together."""
        return self.form.layout(tokens=tokens, requests=requests, block_size=block_size)

    def taken_apart(self, sequence: int) -> tuple[Part, ...]:
        """A sequence's state as llama.cpp writes it now."""
        return parse(self.context.write_out(sequence), self.memories)

    def close(self) -> None:
        """Free the context. Safe to call twice."""
        self.context.close()

    def _fill(self) -> tuple[str, tuple[Part, ...]]:
        probe = probe_token_ids(self.vocab_size)
        rows = self.context.decode(0, probe.prefill.tolist(), 0, every_row=True)
        step = self.context.decode(0, [probe.step], len(probe.prefill))
        written = self.context.write_out(0)
        try:
            template = parse(written, self.memories)
            same = np.array_equal(build(template)[8:], written[8:])  # magic and sequence id aside
        except KVFerryError as error:
            raise LocalError(
                f"llama-cpp-python {llama_cpp.__version__} writes this model's state in a form that is"
                f" not known here: {error.message}",
                next_step="compare the version with the one that the extra 'llamacpp' names",
            ) from error
        if not same:
            raise LocalError(
                "the state that llama.cpp wrote is not what was understood of it, put together again",
                next_step="compare the version with the one that the extra 'llamacpp' names",
            )
        self.context.clear(0)
        return probe_digest(chain(rows, step)), template

    def _read_identity(self, path: Path) -> Fingerprint:
        reader = open_gguf(path)
        given = self.options
        fields = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith(("GGUF.", "general.", "tokenizer."))
        }
        fields["architecture"] = reader.fields["general.architecture"].contents()
        fields["rope_freq_base given"] = given.rope_freq_base
        system = " ".join(llama_cpp.llama_print_system_info().decode().split())
        attention = "flash" if given.flash_attention else "plain"
        return Fingerprint(
            engine=ENGINE,
            build=f"llama-cpp-python {llama_cpp.__version__}, {attention} attention, {system}"[:256],
            weights=gguf_weights(reader),
            config=config_digest(fields),
            tokenizer=self.tokenizer.digest,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            probe=self.probe,
        )


def _memories(context: Context) -> tuple[type[Part], ...]:
    """The parts of a sequence's state, in the order in which llama.cpp writes them."""
    if context.is_recurrent:
        return (Recurrent,)
    attention = (Attention,) if context.window is None else (Attention, Attention)
    return (*attention, Recurrent) if context.is_hybrid else attention

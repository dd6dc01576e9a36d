"""Incremental text against decoding everything at once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.reference.tokenizer import ByteTokenizer
from kvferry.engines.text import OutputText

BYTES = ByteTokenizer(300)
REPLACEMENT = "\ufffd"
texts = st.text(alphabet="abé日🙂", max_size=12)
any_tokens = st.lists(st.integers(0, 299), max_size=24) | texts.map(lambda text: list(text.encode()))


class Pieces:
    """A tokenizer whose tokens are any byte strings, so that tokens and characters do not line up."""

    stop_token_ids = ()
    digest = ""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        """Not needed here."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """The piece itself."""
        return self.pieces[token]


def cut(data: bytes, borders: set[int]) -> list[bytes]:
    """``data`` in pieces that end at ``borders``."""
    edges = sorted({0, len(data), *(border for border in borders if border < len(data))})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(any_tokens)
def test_the_pieces_given_out_are_the_whole_text(tokens: list[int]) -> None:
    """Joined, they equal one decode of all bytes, valid UTF-8 or not; special tokens add nothing."""
    stream = OutputText(BYTES, ())
    given_out = ""
    for token in tokens:
        stream.push(token)
        given_out += stream.take(is_last=False)
    given_out += stream.take(is_last=True)
    assert given_out == bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


@given(texts.filter(bool))
def test_half_a_character_is_never_given_out(text: str) -> None:
    """Before the end, no replacement character appears and no character that is not in the text."""
    stream = OutputText(BYTES, ())
    given_out = ""
    for token in text.encode():
        stream.push(token)
        given_out += stream.take(is_last=False)
        assert text.startswith(given_out)
        assert REPLACEMENT not in given_out
    assert given_out == text


@given(
    texts,
    st.sets(st.integers(1, 40)),
    st.lists(st.text(alphabet="ab日", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, borders: set[int], stops: list[str]) -> None:
    """However the tokens cut it, and nothing of a stop string was given out before it was complete."""
    pieces = cut(text.encode(), borders)
    stream = OutputText(Pieces(pieces), tuple(stops))
    given_out, stopped, seen = "", False, b""
    for token, piece in enumerate(pieces):
        seen += piece
        stopped = stream.push(token)
        whole = seen.decode("utf-8", "ignore")
        ends = [whole.index(stop) for stop in stops if stop in whole]
        assert stopped == bool(ends)
        given_out += stream.take(is_last=stopped)
        if stopped:
            assert given_out == whole[: min(ends)]
            return
    assert given_out + stream.take(is_last=True) == text


@given(any_tokens, st.integers(0, 24), st.sampled_from([(), ("ab",), ("a日a", "bb")]))
def test_a_replayed_stream_goes_on_as_the_first(
    tokens: list[int], border: int, stops: tuple[str, ...]
) -> None:
    """From any token on: the same pieces, the same tail, the same stop, also inside a character."""
    first = OutputText(BYTES, stops)
    for token in tokens[:border]:
        if first.push(token):
            return
        first.take(is_last=False)
    second = OutputText(BYTES, stops)
    second.replay(tokens[:border])
    assert (second.emitted_chars, second.tail) == (first.emitted_chars, first.tail)
    for token in tokens[border:]:
        stopped = first.push(token)
        assert second.push(token) == stopped
        assert second.take(is_last=stopped) == first.take(is_last=stopped)
        if stopped:
            return
    assert second.take(is_last=True) == first.take(is_last=True)


def test_a_stop_string_before_the_minimum_does_not_stop_later() -> None:
    """What was let pass is not found afterwards, though a longer stop string keeps it in the tail."""
    stream = OutputText(BYTES, ("ab", "zzzz"))
    for byte in b"xab":
        assert not stream.push(byte, can_stop=False)
    assert not stream.push(ord("c"))
    assert not stream.push(ord("a"))
    assert stream.push(ord("b"))
    assert stream.text == "xabc"

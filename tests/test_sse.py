"""Server-sent events: what a model writes never ends a line, wherever the network cuts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PeerError
from kvferry.sse import MAX_EVENT_NBYTES, event_data


def read(*parts: bytes) -> list[bytes]:
    async def arriving() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def read_all() -> list[bytes]:
        return [data async for data in event_data(arriving())]

    return asyncio.run(read_all())


@given(
    texts=st.lists(st.text() | st.sampled_from(["\u2028", "\u2029 a", "\x85", "\x0b\x0c", "\x1c\x1d\x1e"])),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    data=st.data(),
)
def test_any_text_comes_back_wherever_it_is_cut(texts: list[str], end: bytes, data: st.DataObject) -> None:
    """JSON that is not escaped, as servers write it; each way to end a line; any parts, empty ones too."""
    events = [json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace") for text in texts]
    wire = b"".join(b": beat" + end + b"data: " + event + end + b"id: 7" + end + end for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    parts = [wire[first:last] for first, last in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert read(*parts) == events


def test_lines_of_one_event_are_joined_and_its_empty_line_may_be_missing() -> None:
    assert read(b"data:a\ndata: b\n\n\n\nevent: x\n\ndata: [DONE]\n") == [b"a\nb", b"[DONE]"]


def test_an_event_without_an_end_is_refused() -> None:
    with pytest.raises(PeerError, match="an event of more than"):
        read(b"data: ", *[b"x" * 65536] * (MAX_EVENT_NBYTES // 65536 + 1))

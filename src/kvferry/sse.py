"""Server-sent events as they are read: https://html.spec.whatwg.org/multipage/server-sent-events.html.

Lines end with LF, CR LF or CR and with nothing else. Readers of text lines also cut at U+2028,
U+0085 and others, which JSON may hold as they are: a model's text would then break its own events.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from kvferry.errors import PeerError

__all__ = ["MAX_EVENT_NBYTES", "event_data"]

MAX_EVENT_NBYTES = 4 << 20
_LINE_END = re.compile(rb"\r\n|\r|\n")


async def event_data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, its lines joined by LF; other fields and comments are passed over.

    Raises PeerError for an event beyond ``MAX_EVENT_NBYTES``, and whatever ``parts`` raises.
    """
    pending = b""
    data: list[bytes] = []
    async for part in parts:
        pending += part
        if len(pending) + sum(len(line) for line in data) > MAX_EVENT_NBYTES:
            raise PeerError(f"an event of more than {MAX_EVENT_NBYTES} bytes came")
        end = len(pending) - pending.endswith(b"\r")  # that may be the first half of CR LF
        *lines, rest = _LINE_END.split(pending[:end])
        pending = rest + pending[end:]
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if data:  # its empty line was left out
        yield b"\n".join(data)

"""Which path UCX took: read back from its own log, since it falls back without a word.

UCX prints, once for each kind of endpoint, by what it reads remote memory:

    | kvferry-1-ab inter-node cfg#2                              |
    | remote memory read by ucp_get*(multi) into host memory ... |
    | 0..inf | zero-copy | cma/memory                            |

It is told to print into a memory file of ours while the agent is made; a user's own UCX_LOG_*
settings are left alone, and then the path is not known.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator

__all__ = ["UNKNOWN", "PathLog", "read_paths", "short_path"]

UNKNOWN = "ucx"
_SETTINGS = ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO")
_HEAD = re.compile(r"\| .*?(?P<place>self|intra-node|inter-node) cfg#(?P<number>\d+)\s*\|")
_READ = re.compile(r"\| remote memory read by ucp_get")
_ROW = re.compile(r"\|[^|]*\.\.inf\s*\|[^|]*\|\s*(?P<config>[^|]*?)\s*\|")


class PathLog:
    """UCX's log of this process, in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._known: dict[tuple[str, int], str] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While the block runs, UCX reads settings by which it logs to here for good.

        They are gone from the environment afterwards: child processes have no such file.
        """
        if any(name in os.environ for name in _SETTINGS):
            yield
            return
        self._fd = os.memfd_create("kvferry-ucx-log")
        values = ("info", f"/proc/self/fd/{self._fd}", "y")
        os.environ.update(zip(_SETTINGS, values, strict=True))
        try:
            yield
        finally:
            for name in _SETTINGS:
                del os.environ[name]

    def news(self, *, is_self: bool) -> str:
        """What carries reads of the endpoints that appeared since the last call, else of all known ones.

        ``is_self``: of this process's endpoint to itself, else of those to others. Several ways
        that cannot be told apart are joined by ``|``; UNKNOWN where nothing was logged.
        """
        with self._lock:
            if self._fd is None:
                return UNKNOWN
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream
            text = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")
            before, self._known = self._known, read_paths(text)
            meant = {key: path for key, path in self._known.items() if (key[0] == "self") is is_self}
            fresh = {path for key, path in meant.items() if key not in before}
            return "|".join(sorted(fresh or set(meant.values()))) or UNKNOWN


def read_paths(text: str) -> dict[tuple[str, int], str]:
    """What carries large reads, by place and number of each kind of endpoint: cma, tcp, rc_mlx5."""
    paths: dict[tuple[str, int], str] = {}
    key: tuple[str, int] | None = None
    reads = False
    for line in text.splitlines():
        if head := _HEAD.search(line):
            key, reads = (head["place"], int(head["number"])), False
        elif _READ.search(line):
            reads = True
        elif reads and key is not None and (row := _ROW.search(line)):
            paths[key] = short_path(row["config"])
    return paths


def short_path(config: str) -> str:
    """``52% on tcp/lo and 48% on tcp/eth0`` is ``tcp``; several transports are joined by a plus."""
    names = re.findall(r"([a-z][a-z0-9_]*)/", config)
    return "+".join(sorted(set(names))) or UNKNOWN

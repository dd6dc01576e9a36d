"""``kvferry serve``: the reference engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from kvferry.cli.options import Whole
from kvferry.cli.tls_flags import TlsFlags

if TYPE_CHECKING:
    from kvferry.serve import ServeOptions
    from kvferry.serve.run import Serving
    from kvferry.transport.security import Security

__all__ = ["ServeFlags", "serve"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Where it listens, and how much it takes."""

    listen: str = "127.0.0.1:8000"
    "HOST:PORT of HTTP; port 0 takes a free one."
    kv: str = ""
    "Address for KV, tcp://HOST:PORT or shm://NAME: lets it hand requests over, and take them."
    model: Literal["auto", "smollm2", "tiny"] = "auto"
    "SmolLM2-135M, or random weights of the same class; auto takes the first where it is installed."
    name: str = "server"
    "What peers call it in errors."
    block_size: Whole = 16
    "Tokens of a block of the pool."
    chunk_tokens: Whole = 256
    "Prompt tokens that one step computes, beside one token of each running request."
    pool_tokens: Whole = 16384
    "Tokens of KV that the pool holds."
    max_running: Whole = 64
    "Requests that decode at the same time."
    max_waiting: Whole = 128
    "Requests that may wait; one more is answered 429."
    queue_seconds: float = 60.0
    "How long one waits at most; then 503."
    lease_seconds: float = 30.0
    "How long prefilled KV, or a reservation, is kept for the other worker."
    timeout_seconds: float = 10.0
    "How long a move may take."

    def options(self, security: Security) -> ServeOptions:
        """The library's own record of them."""
        from kvferry.serve import ServeOptions

        given = {name: getattr(self, name) for name in ServeOptions.__struct_fields__ if hasattr(self, name)}
        return ServeOptions(**given, security=security)


def serve(
    *,
    flags: ServeFlags | None = None,
    tls: TlsFlags | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Serve the reference engine: completions and chat, alone or as a prefill or decode worker.

    A small server to try handoffs and measurements on; it ends on Ctrl-C.

    Parameters
    ----------
    as_json
        Print the line that says it is ready as one JSON object.
    """
    from kvferry.serve import run_server

    def ready(serving: Serving) -> None:
        if as_json:
            print(msgspec.json.encode(serving).decode())
        else:
            kv = f", KV at {' '.join(serving.kv)}" if serving.kv else ""
            print(f"{serving.url} serves {serving.model}{kv}; Ctrl-C ends it")
            if serving.live:
                print(f"live page: {serving.live}")
        sys.stdout.flush()

    run_server((flags or ServeFlags()).options((tls or TlsFlags()).security()), ready)

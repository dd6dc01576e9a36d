"""Stand-ins for what vLLM gives the adapter: requests, steps, and packed CPU pools of fake workers."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.vllm.identity import fingerprint, requirements
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.pool_layout import Group, LayerTensor, pool_layout
from kvferry.engines.vllm.results import Results
from kvferry.engines.vllm.step import PushSave, Step, tickets_from
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.layout import ITEMSIZE, PoolLayout
from kvferry.state import pack_ids
from kvferry.transfer import Pool

LAYERS, HEADS, DIM = 2, 2, 4


@dataclass
class FakeRequest:
    """The fields of vLLM's ``Request`` that the adapter reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    output_token_ids: list[int] = field(default_factory=list)
    sampling_params: Any = None
    abort_immediately: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    def set_status(self, name: str) -> FakeRequest:
        self.status = SimpleNamespace(name=name)
        return self


def scheduled(blocks: dict[str, list[int]], **tokens: int) -> Any:
    """A scheduler output with so many tokens of each request."""
    state = SimpleNamespace(get_block_ids=lambda key: (blocks[key],) if key in tokens else None)
    return SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)


class FakeWorker:
    """One rank with a packed pool, as vLLM's CPU backend packs it: K transposed, V plain."""

    def __init__(
        self,
        block_size: int = 32,
        num_blocks: int = 16,
        rank: int = 0,
        weights: str = "ab" * 32,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        self.log: list[str] = []
        self.ended = Results()
        self.block_size, self.num_blocks = block_size, num_blocks
        layout = packed_layout(block_size, num_blocks, rank, dtype)
        self.memory = np.zeros(layout.nbytes, np.uint8)
        identity = fingerprint(
            build="fake",
            weights=weights,
            config={"layers": LAYERS},
            cache={"dtype": dtype},
            tokenizer="cd" * 32,
            vocab_size=512,
            max_context=4096,
        )
        self.side = WorkerSide(
            Pool(self.memory, layout),
            requirements(identity, layout, 2 * HEADS, "packed"),
            Options(**({"lease_seconds": 30.0, "pull_timeout_seconds": 10.0} | options)),
            rank=rank,
            name=f"fake {rank}",
            log=self.log.append,
        )

    @property
    def regions(self) -> NDArray[np.float32]:
        """[layer, block, head, k|v, 32-bit values], a view of the pool."""
        return self.memory.view(np.float32).reshape(LAYERS, self.num_blocks, HEADS, 2, self.block_size * DIM)

    def write(self, blocks: list[int], keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """What vLLM's kernel does with K and V of shape (layer, token, head, element)."""
        for at in range(keys.shape[1]):
            block, slot = blocks[at // self.block_size], at % self.block_size
            for layer, head in np.ndindex(LAYERS, HEADS):
                packed_keys, packed_values = self.regions[layer, block, head]
                packed_keys.reshape(DIM, self.block_size)[:, slot] = keys[layer, at, head]
                packed_values.reshape(self.block_size, DIM)[slot] = values[layer, at, head]

    def read(self, blocks: list[int], tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V as vLLM's kernel would see them."""
        found = np.zeros((2, LAYERS, tokens, HEADS, DIM), np.float32)
        for at in range(tokens):
            block, slot = blocks[at // self.block_size], at % self.block_size
            for layer, head in np.ndindex(LAYERS, HEADS):
                packed_keys, packed_values = self.regions[layer, block, head]
                found[0, layer, at, head] = packed_keys.reshape(DIM, self.block_size)[:, slot]
                found[1, layer, at, head] = packed_values.reshape(self.block_size, DIM)[slot]
        return found[0], found[1]

    def step(self, step: Step, finished: set[str] = frozenset()) -> Results:  # type: ignore[assignment]
        """One step of vLLM's worker: what ended by now, which may be what this very step began.

        It is also added to ``ended``, so that a test may wait for what a step before told.
        """
        self.side.before_step(step)
        self.side.begin_pushes(step)
        self.side.begin_loads(step)
        self.side.begin_saves(step)
        results = self.side.collect(finished)
        self.ended.saved |= results.saved
        self.ended.loaded |= results.loaded
        self.ended.failed |= results.failed
        self.ended.moves += results.moves
        self.ended.errors += results.errors
        return results


def packed_layout(block_size: int, num_blocks: int, rank: int = 0, dtype: str = "float32") -> PoolLayout:
    """Where things lie in a ``FakeWorker``'s pool."""
    head = 2 * block_size * DIM * ITEMSIZE[dtype]
    region = num_blocks * HEADS * head
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return pool_layout(
        [Group(tuple(names), block_size, HEADS, DIM)],
        {name: LayerTensor(at * region, HEADS * head, head) for at, name in enumerate(names)},
        dtype=dtype,
        num_blocks=num_blocks,
        nbytes=LAYERS * region,
        first_head=rank * HEADS,
    )


def random_kv(tokens: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V of a prompt, (layer, token, head, element) each."""
    keys, values = np.random.default_rng(seed).standard_normal((2, LAYERS, tokens, HEADS, DIM), np.float32)
    return keys, values


class PrefillInterface:
    """The part of a prefill server's HTTP interface that decode asks for a push.

    ``status`` other than 200 is what it answers; ``refuse`` is given as the reason for no push.
    """

    def __init__(self, worker: FakeWorker, computed_tokens: int = 0) -> None:
        self.status, self.refuse = 200, ""
        self.pushed: list[str] = []
        interface = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                params = body["kv_transfer_params"]
                if interface.status != 200 or interface.refuse:
                    refusal = {"kv_transfer_params": {"kvferry_refused": interface.refuse}}
                    return self.answer(refusal, interface.status)
                interface.push(worker, body["prompt"], params, computed_tokens)
                return self.answer({"kv_transfer_params": params | {"do_remote_prefill": True}})

            def answer(self, body: dict[str, Any], status: int = 200) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def push(self, worker: FakeWorker, ids: list[int], params: dict[str, Any], computed_tokens: int) -> None:
        """One step of vLLM that computes the rest of a prompt, layer by layer."""
        blocks = list(range(1, -(-len(ids) // worker.block_size) + 1))
        keys, values = random_kv(len(ids), len(ids))
        worker.write(blocks, keys[:, :computed_tokens], values[:, :computed_tokens])
        request_id = f"push-{len(self.pushed)}"
        save = PushSave(request_id, tickets_from(params), pack_ids(ids), (tuple(blocks),), computed_tokens)
        worker.side.begin_pushes(Step(pushes=[save]))
        worker.write(blocks, keys, values)
        for layer in range(LAYERS):
            worker.side.layer_done(layer)
        worker.side.begin_saves(Step())
        self.pushed.append(request_id)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

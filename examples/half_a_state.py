"""KV alone is not a request: hand one over without a part of its state, and see what decode says.

python examples/half_a_state.py
"""

from __future__ import annotations

import msgspec

from kvferry import Pool
from kvferry.engines.reference import ReferenceEngine, tiny_model
from kvferry.errors import KVFerryError
from kvferry.layout import PoolLayout
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transfer import Endpoint

MODEL = tiny_model(0)
PROMPT = list(range(5, 65))


def worker(name: str) -> tuple[ReferenceEngine, Endpoint]:
    """An engine over a pool of its own, and its endpoint."""
    config = MODEL.config
    layout = PoolLayout.paged(
        range(config.layers), kv_heads=config.kv_heads, head_dim=config.head_dim,
        dtype="float32", block_size=16, num_blocks=64,
    )  # fmt: skip
    pool = Pool.allocate(layout)
    engine = ReferenceEngine(MODEL, layout, pool.array)
    endpoint = Endpoint.listen(
        f"inproc://{name}", pool=pool, requirements=engine.requirements(), process=False
    )
    return engine, endpoint


def main() -> None:
    """Whole, then with one part left out at a time."""
    (prefill, source), (decode, target) = worker("prefill"), worker("decode")
    sampling = SamplingParameters(temperature=0.8, repetition_penalty=1.2, seed=7)
    prefill.submit("r", PROMPT, sampling, Limits(max_tokens_left=8))
    while not prefill.prefill("r"):
        pass
    damages = {
        "the whole state": lambda state: state,
        "without the RNG": lambda state: msgspec.structs.replace(state, rng=None),
        "without the last logits": lambda state: msgspec.structs.replace(
            state, tokens=msgspec.structs.replace(state.tokens, last_logits=None)
        ),
        "without block tables": lambda state: msgspec.structs.replace(state, blocks=()),
        "without the last token's KV": lambda state: msgspec.structs.replace(
            state, kv_tokens=state.kv_tokens - 1
        ),
    }
    for name, damage in damages.items():
        tables = decode.allocate(len(PROMPT) + 8)
        try:
            state = damage(prefill.export_state("r", Exactness.BITS))  # each export is an attempt of its own
            move = target.pull(source.offer(state, prefill.tables("r")), tables)
            move.result()
            move.abort("this was only to see whether it would start")
            print(f"{name}: decode may start")
        except KVFerryError as error:
            print(f"{name}: {error.message}")
        decode.free(tables)
    for endpoint in (source, target):
        endpoint.close()
        endpoint.pool.close()


if __name__ == "__main__":
    main()

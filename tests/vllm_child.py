"""One real vLLM in a process of its own, driven by lines of JSON: the engine of the offline tests.

    python vllm_child.py MODEL CONFIG_JSON

Not a test itself. The connector is the shipped one with one addition: after ``corrupt``, the
blocks of the next prompt that is offered are zeroed once its digests are taken.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

# Set before vLLM is imported: one process, one thread, no pinning to cores that others use.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvferry.engines.vllm.connector import KVFerryConnector

corrupt_next = False


class Corrupting(KVFerryConnector):
    """Damages KV after its export, as a stray write would."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        global corrupt_next  # noqa: PLW0603
        answer = super().request_finished_all_groups(request, block_ids)
        if corrupt_next and answer[0]:
            corrupt_next = False
            worker = get_kv_transfer_group()
            for tensor in worker.test_caches.values():
                tensor[block_ids[0]] = 0
        return answer

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.test_caches = kv_caches

    def update_connector_output(self, connector_output: Any) -> None:
        """Called in this process, whichever the ranks run in."""
        super().update_connector_output(connector_output)
        if connector_output.kv_connector_stats is not None:
            for key in seen:
                seen[key] += connector_output.kv_connector_stats.data[key]


seen: dict[str, list[Any]] = {"nbytes": [], "failed": [], "expired": []}


class Child:
    """Answers commands; between them it steps the engine, as a server would."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=config.pop("batched_tokens", 4096),
            block_size=config.pop("block_size", 32),
            tensor_parallel_size=config.pop("ranks", 1),
            num_gpu_blocks_override=config.pop("num_blocks", 128),
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="Corrupting",
                kv_connector_module_path="vllm_child",
                kv_role="kv_both",
                kv_load_failure_policy=config.pop("policy", "fail"),
                kv_connector_extra_config=config,
            ),
        )
        self.core = self.llm.llm_engine.engine_core

    def generate(self, prompts: list[list[int]], kv: list[Any], salt: str, **sampling: Any) -> list[Any]:
        sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
        parameters = [
            SamplingParams(**sampling, extra_args={"kv_transfer_params": params} if params else None)
            for params in kv
        ]
        given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
        outputs = self.llm.generate(given, parameters, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "reason": output.outputs[0].finish_reason,
                "kv": output.kv_transfer_params,
            }
            for output in outputs
        ]

    def corrupt(self) -> None:
        global corrupt_next  # noqa: PLW0603
        corrupt_next = True

    def stats(self) -> dict[str, Any]:
        scheduler = self.core.engine_core.scheduler
        usage = scheduler.kv_cache_manager.usage
        return {key: list(values) for key, values in seen.items()} | {
            "usage": usage,
            "requests": len(scheduler.requests),
        }

    def run(self, answers: Any) -> None:
        answers.write(json.dumps({"ready": True}) + "\n")
        answers.flush()
        while True:
            if not select.select([sys.stdin], [], [], 0.01)[0]:
                self.core.get_output()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            command = json.loads(line)
            answer = getattr(self, command.pop("do"))(**command)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def main() -> None:
    import vllm_child

    # Standard output is for answers alone; what vLLM prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.monotonic()
    child = vllm_child.Child(sys.argv[1], json.loads(sys.argv[2]))
    print(f"started in {time.monotonic() - started:.1f} s", file=sys.stderr)
    child.run(answers)


if __name__ == "__main__":
    main()

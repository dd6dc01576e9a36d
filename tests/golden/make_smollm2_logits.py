"""Write ``smollm2_logits.json``: logits of SmolLM2-135M-Instruct (Q4_1) from transformers, in float32.

An implementation that shares no line with the reference engine, on the same weights. Run it where
``torch``, ``transformers``, ``accelerate`` and ``gguf`` are installed::

    python tests/golden/make_smollm2_logits.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

Whole vectors cannot be compared by hash, since each BLAS rounds in its own order; so the file keeps,
for some positions of a fixed prompt, the logits of the highest token and of 63 fixed tokens, the
vector's mean, and then 32 tokens of greedy continuation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = (
    "<|im_start|>user\nIn 1847 the harbour master counted 12,305 crates and 98 barrels.\n\n"
    "\tHe wrote: 'naïve café, 日本, 🙂' - and don't ask why!  What did he count?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GREEDY_TOKENS = 32
CHOSEN = [(7919 * step + 11) % 49152 for step in range(63)]


def main(gguf_path: Path) -> None:
    """Compute and write the golden file beside this script."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    prompt = tokenizer(PROMPT, add_special_tokens=False).input_ids
    ids = list(prompt)
    rows = []
    with torch.no_grad():
        for _ in range(GREEDY_TOKENS):
            logits = model(torch.tensor([ids])).logits[0]
            if not rows:
                rows = [describe(position, logits[position]) for position in positions(len(prompt))]
            ids.append(int(logits[-1].argmax()))
    golden = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "weights": gguf_path.name,
        "prompt": PROMPT,
        "prompt_ids": prompt,
        "greedy_ids": ids[len(prompt) :],
        "rows": rows,
    }
    out = Path(__file__).with_name("smollm2_logits.json")
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def positions(count: int) -> list[int]:
    """First, an early, a middle and the last position of a prompt of ``count`` tokens."""
    return [0, 5, count // 2, count - 1]


def describe(position: int, logits: torch.Tensor) -> dict[str, object]:
    """The kept part of one vector of logits."""
    top = int(logits.argmax())
    tokens = [top, *CHOSEN]
    return {
        "position": position,
        "mean": float(logits.double().mean()),
        "tokens": tokens,
        "logits": [float(logits[token]) for token in tokens],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

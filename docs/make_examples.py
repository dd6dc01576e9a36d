"""Write the pages whose boxes show what commands print: ``docs/mistakes.md`` and ``docs/howto-size.md``.

    python docs/make_examples.py

A test fails when a page is not what this writes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

MISTAKES = """\
<!-- Written by docs/make_examples.py. -->
# Common mistakes

Each of these looks right on a slide. What stands in the boxes is what the commands print.

## To plan with the brochure's line rate

A 400 Gb/s port is 50 GB/s on paper. What a pair of nodes reaches with a KV payload, thousands of pieces of
some KiB, beside other traffic, is another number, and only a measurement has it. So an answer that rests on
a brochure rate is an estimate, marked as such; `check` ends with exit status 4 and promises nothing.

{brochure}
Measure the pair (`kvferry probe`), and give the file to `--link`.

## To move a cold cache of some GB against a tight TTFT

The prompt is long, nothing of it is cached at decode, and the promise is short. The flips say what would
have to change: a shorter prompt, more prefix hits, another rate, or moving while prefill still computes.

{cold}
## To move the KV and not the rest

K and V are most of the bytes and a part of the request. Without the random generator's place the next draw
is another one; without the last logits (or the token that was drawn from them) there is nothing to go on
from; without block tables nobody knows which block is whose. None of it shows as an error in the KV: a
decode worker that just starts would write another text. `examples/half_a_state.py` hands one request over
whole, and then without one part at a time:

{half}
The whole list, with the check that finds each: [state.md](state.md).

## To take bits for bytes

2 x 4096 x 80 x 1024 x 2 is a number of bytes: 1.34 GB. As bits it is 10.7 Gb, and a widely read text has
"10.7 GB".

{bits}
More of this kind: [bits-and-bytes.md](bits-and-bytes.md).
"""

SIZE = """\
<!-- Written by docs/make_examples.py. -->
# Size my model

**You need** the model's `config.json` (it lies beside the weights; on a hub it is one file of a few kB),
or the numbers of layers, KV heads and head dimension. Nothing is downloaded and no weights are read.

## 1. The whole payload

Give the config, or the shape, and how many tokens have KV when the request moves: the prompt, and what
was written so far. This is a model of 32 layers with 8 KV heads of 128, Llama 3.1 8B's numbers:

{whole}
*logical* is what is live, *blocked* what the pool's blocks hold, *per rank* what one GPU of the
tensor-parallel group holds, *wire* what crosses. The last table is arithmetic with brochure rates: for
an answer measure the link.

## 2. What really crosses

Decode often holds a prefix of the prompt already. In whole blocks, and with the ranks that you run:

{cached}
Half of the tokens are there, so half of the bytes cross; the state record crosses always. Attention
shrinks with hits; windows, recurrent state and cross attention always move
([why](decisions/0011-what-always-moves.md)).

## 3. Other dtypes, models side by side

`--kv-dtype fp8_e4m3` (or `--k-dtype` and `--v-dtype`), `--pp`, `--draft mtp`, several models at once,
and a picture:

```console
$ kvferry size A/config.json B/config.json --tokens 8192 --kv-dtype fp8_e4m3 --plot sizes.svg
$ kvferry size A/config.json --tokens 8192 --json
```

A config with a cache that is not known is refused by the field's name; give the shape by hand then.
Which families are known, and how each is counted: [models](models.md). Bits and bytes:
[here](bits-and-bytes.md).

**Next:** [measure my nodes](howto-measure.md).
"""

COMMANDS = {
    "brochure": "kvferry check shape:80x8x128 --link ib-ndr400 --prompt-tokens 8192 --ttft 500ms"
    " --prefill-seconds 0.3 --decode-seconds 0.02",
    "cold": "kvferry check shape:80x8x128 --link eth100 --prompt-tokens 16384 --ttft 500ms"
    " --prefill-seconds 0.4 --decode-seconds 0.02",
    "half": "python examples/half_a_state.py",
    "bits": "kvferry size shape:80x8x128 --tokens 4096",
    "whole": "kvferry size shape:32x8x128 --tokens 8192 --block-size 16",
    "cached": "kvferry size shape:32x8x128 --tokens 8192 --cached 4096 --block-size 16 --tp 2",
}
PAGES = {"mistakes.md": MISTAKES, "howto-size.md": SIZE}


def shown(command: str) -> str:
    """A command and what it prints, as a box of a page."""
    words = command.split()
    program = [sys.executable, *(["-m", "kvferry"] if words[0] == "kvferry" else [])]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "118", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=100,
    )
    if done.returncode not in (0, 3, 4):
        raise SystemExit(f"{command}: exit status {done.returncode}")
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    status = f"\n(exit status {done.returncode})" if done.returncode else ""
    return f"```console\n$ {command}\n{text.strip()}{status}\n```\n"


def page(name: str) -> str:
    """A page with its boxes filled."""
    text = PAGES[name]
    return text.format(**{key: shown(command) for key, command in COMMANDS.items() if f"{{{key}}}" in text})


if __name__ == "__main__":
    for file_name in PAGES:
        (ROOT / "docs" / file_name).write_text(page(file_name), "utf-8")

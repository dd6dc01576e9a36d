"""Coverage-guided fuzzing of everything that reads bytes from outside: ``make fuzz``.

    python tests/fuzz.py frames|records [-runs=10000000] [-max_total_time=SECONDS] [libFuzzer options]

Needs the package atheris. Ends with an error, and the input in a file ``crash-*``, at the first
exception that is none of kvferry's, input that takes 10 s, or memory above 2 GiB.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvferry"]):
    from fuzz_targets import FRAMES, RECORDS, SEEDS, TARGETS

from kvferry.errors import KVFerryError

GROUPS = {"frames": FRAMES, "records": RECORDS}


def main() -> None:
    name, *given = sys.argv[1:]
    targets = GROUPS[name]

    def one_input(data: bytes) -> None:
        """Anything but a KVFerryError is a finding."""
        with contextlib.suppress(KVFerryError):
            targets[data[0] % len(targets)](data[1:]) if data else None

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(SEEDS):
            if TARGETS[seed[0]] in targets:
                first = targets.index(TARGETS[seed[0]])
                (Path(folder) / f"seed-{number:03}").write_bytes(bytes([first]) + seed[1:])
        defaults = [
            "-runs=10000000",
            "-max_len=16384",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *defaults, *given, folder], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

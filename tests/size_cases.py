"""The golden sizes: one row a case, with where its figure comes from (``golden/kv_sizes.csv``)."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "kv_sizes.csv"
_DIFFERENCE = re.compile(r"logical_bytes\((\d+)\)-logical_bytes\((\d+)\)")


@dataclass(frozen=True)
class GoldenCase:
    """A config, the options of ``kvferry size``, and the expected value of one field of its JSON."""

    name: str
    config: dict[str, object]
    tokens: int
    options: tuple[str, ...]
    field: str
    expected: float
    source: str

    @property
    def token_counts(self) -> list[int]:
        """The numbers of tokens to ask about: one, or two for a difference."""
        match = _DIFFERENCE.fullmatch(self.field)
        return [self.tokens] if match is None else [int(match[1]), int(match[2])]

    def value_of(self, objects: list[dict[str, object]]) -> object:
        """The field's value in the JSON objects for :attr:`token_counts`."""
        if len(objects) == 2:
            return int(str(objects[0]["logical_bytes"])) - int(str(objects[1]["logical_bytes"]))
        if self.field == "rank_bytes[0]":
            ranks = objects[0]["rank_bytes"]
            assert isinstance(ranks, list)
            return ranks[0]
        return objects[0][self.field]


def golden_cases() -> list[GoldenCase]:
    with GOLDEN.open(newline="") as file:
        return [
            GoldenCase(
                name=row["name"],
                config=json.loads(row["config_json"]),
                tokens=int(row["tokens"]),
                options=tuple(row["options"].split()),
                field=row["field"],
                expected=float(row["expected_bytes"]),
                source=row["source"],
            )
            for row in csv.DictReader(file)
        ]

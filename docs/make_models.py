"""Write ``docs/models.md``: the families covered, what each caches, and the fields read.

Run ``python docs/make_models.py`` after a change to a family or to the golden cases. The fields
are those that the family's function really reads on its golden cases; nothing is typed by hand.
A test checks that no field named in a family's function is missing here, so each has a golden case.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from kvferry.dtypes import DTYPES, KVDtype
from kvferry.model.fields import Fields
from kvferry.model.registry import FAMILIES, Family
from kvferry.model.shape import LayerKind
from kvferry.model.source import language_part
from kvferry.model.wrappers import TEXT_CONFIGS, WRAPPERS

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "kv_sizes.csv"
TARGET = ROOT / "docs" / "models.md"

HEAD = """\
<!-- Written by docs/make_models.py; a test checks that it is fresh. -->
# Models that can be sized

`kvferry size` and `ModelShape.from_config` read a Hugging Face `config.json`. Each family is one
function in `src/kvferry/model/families/`; its fields below are those it reads on its golden cases
(`tests/golden/kv_sizes.csv`). After a slash: other names of the same field; two of them with unlike
values are refused.

## What is refused

- A field that a family neither reads nor states to understand, and whose name says something of
  attention, heads, windows, states, sharing, or which layer is what, at any depth and of any JSON
  type; and any list with one entry for each layer. Let pass are names that are known to say nothing
  of the cache (`src/kvferry/model/harmless.py`) and values that say nothing: null, false, zero, a
  negative number, empty, or nulls all through.
- A layer type that the family does not handle, an index that names no layer or names one twice,
  lists that contradict each other, and any layer that neither owns a cache nor is known to own none.
- Widths that do not divide: hidden width by heads, query heads by KV heads.

A model type that is not listed is sized as plain full attention, with a warning that says so, if it
passes the same guard and does not look like an encoder, which keeps no KV cache (`architectures`
without a generating class, `type_vocab_size`, `image_size` and the like).

A field that is left out is the model class's own default where there is one (transformers 5.24.0,
`src/kvferry/model/class_defaults.py`), and a warning says so: any field of a text config inside a
wrapper, which is written as its difference from the class; in a flat config the head width, the KV
heads and the window.

## Families

Read for every model: `model_type`, `dtype` or `torch_dtype`, `vocab_size`, the draft's layers
(`num_nextn_predict_layers`, `mtp_num_hidden_layers`, `num_mtp_layers`, `num_mtp_modules`,
`mtp_transformer_layers`), `quantization_config.kv_cache_scheme` (for a warning).
"""


class Seen:
    """What a family's function was seen to do on its golden cases."""

    def __init__(self) -> None:
        self.cases = 0
        self.fields: set[str] = set()
        self.kinds: set[LayerKind] = set()


def seen_families() -> dict[Family, Seen]:
    """Run every golden case through its family and note the kinds and the fields."""
    families: dict[Family, Seen] = defaultdict(Seen)
    with GOLDEN.open(newline="") as file:
        for row in csv.DictReader(file):
            fields, model_type = language_part(Fields(json.loads(row["config_json"])))
            if model_type not in FAMILIES:
                continue
            fields.trace.clear()
            function = FAMILIES[model_type]
            shape = function(fields)
            seen = families[function]
            seen.cases += 1
            paths = {path.removeprefix(fields.path) for path in fields.trace}
            seen.fields |= {re.sub(r"\[\d+\]|(?<=config\.)\d+", "[]", path) for path in paths}
            seen.kinds |= {group.kind for group in shape.groups if group.layers}
    return families


def markdown() -> str:
    families = seen_families()
    types: dict[Family, list[str]] = defaultdict(list)
    for model_type, function in FAMILIES.items():
        types[function].append(model_type)
    lines = [
        HEAD,
        "| family | `model_type` | caches | fields read | cases |",
        "| --- | --- | --- | --- | --- |",
    ]
    for function in sorted(types, key=lambda function: min(types[function]).lower()):
        seen = families[function]
        about = (function.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        lines.append(
            f"| {about} | {code(types[function])} | {code(map(str, seen.kinds))} "
            f"| {code(seen.fields)} | {seen.cases} |"
        )
    lines += ["", "## Wrappers", "", "Vision and audio models are sized from their language part"]
    lines += [f"({code(TEXT_CONFIGS)}); known wrappers: {code(WRAPPERS)}.", ""]
    lines += ["## KV dtypes", "", "| dtype | class | bytes of a row of 128 values |", "| --- | --- | --- |"]
    lines += [f"| `{dtype.name}` | {dtype.dtype_class} | {row_of_128(dtype)} |" for dtype in DTYPES.values()]
    return "\n".join(lines) + "\n"


def code(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names, key=str.lower))


def row_of_128(dtype: KVDtype) -> str:
    if dtype.name.endswith("_ds_mla"):
        return "MLA rows only"
    return str(128 // dtype.group_values * dtype.group_nbytes + dtype.row_nbytes)


if __name__ == "__main__":
    TARGET.write_text(markdown())

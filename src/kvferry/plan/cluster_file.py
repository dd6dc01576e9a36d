"""A cluster file: TOML text -> records whose numbers are checked and whose file names are still names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvferry.errors import InputError, NoPlanError, did_you_mean
from kvferry.plan.cluster_tables import ClusterFile, GpuTable, Table
from kvferry.plan.where import toml_place

__all__ = ["parse_cluster", "placed"]

_TOML_LINE = re.compile(r"(.*) \(at line ([0-9]+), column [0-9]+\)")
_BARE = re.compile(r"Expected `str.*`, got `(int|float|bool)`")
_KINDS = {"int": "a number", "float": "a number", "bool": "true or false"}
_EXAMPLES = {
    **dict.fromkeys(("ttft", "tpot", "sync", "start", "descriptor"), '"200ms"'),
    **dict.fromkeys(("rate", "node", "rack", "pod"), '"47 GB/s"'),
    "kv_memory": '"40 GB"',
}

# Of all tables: the message names the table, and one that is near is enough of a hint.
_KEYS = sorted({name for table in Table.__subclasses__() for name in table.__struct_encode_fields__})


def parse_cluster(text: str, source: str) -> ClusterFile:
    """The records of a cluster file.

    Raises InputError, one line with the file, the line and the key, for text that is no TOML, an
    unknown or missing key, a number of the wrong kind or range, and a quantity without its unit.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _TOML_LINE.fullmatch(str(error))
        line, reason = (match[2], match[1]) if match else ("1", str(error))
        raise InputError(f"{source}, line {line}: is not TOML: {reason}") from error
    except (RecursionError, ValueError) as error:
        # Nested without end, or a number of thousands of digits; the parser does not tell where.
        reason = str(error).partition(";")[0]
        raise InputError(f"{source}, line 1 or later: cannot be read: {reason}") from error
    try:
        found = msgspec.convert(data, ClusterFile)
    except msgspec.ValidationError as error:
        raise InputError(_located(data, error, text, source)) from error
    for at, node in enumerate(found.nodes):
        if node.gpu not in found.gpus:
            place = toml_place(source, text, f"nodes[{at}].gpu")
            raise InputError(f"{place}: {node.gpu!r} is not one of gpus: {', '.join(found.gpus)}")
    return found


@contextmanager
def placed(source: str, text: str) -> Iterator[None]:
    """Give an error that begins with a key of the cluster file the file and the line of that key."""
    try:
        yield
    except (InputError, NoPlanError) as error:
        key = error.message.partition(":")[0]
        if key.partition(".")[0] not in ClusterFile.__struct_encode_fields__:
            raise
        place = toml_place(source, text, key).removesuffix(f": {key}")
        raise type(error)(f"{place}: {error.message}", next_step=error.next_step) from error


def _located(data: dict[str, object], error: msgspec.ValidationError, text: str, source: str) -> str:
    """msgspec's message, or that of a record's own check, with its place in the text."""
    reason, _, path = str(error).partition(" - at `")
    key = path.rstrip("`").removeprefix("$").lstrip(".").replace("[...]", f".{_bad_gpu(data)}")
    if isinstance(error.__cause__, ValueError):
        field, _, reason = str(error.__cause__).partition(": ")
        key = f"{key}.{field}".lstrip(".")
    elif "field `" in reason:
        field = reason.split("`")[1]
        key = f"{key}.{field}".lstrip(".")
        reason = f"unknown key{did_you_mean(field, _KEYS)}" if "unknown" in reason else "missing key"
    elif match := _BARE.match(reason):
        example = _EXAMPLES.get(key.rpartition(".")[2])
        reason = f"is {_KINDS[match[1]]}, no text" + (
            f"; it needs its unit, as in {example}" if example else ""
        )
    elif reason.startswith("Invalid enum value"):
        word = reason.partition("'")[2].rstrip("'")
        reason = f"{word!r} is no value that is known{did_you_mean(word, _words())}"
    return f"{toml_place(source, text, key)}: {reason}"


def _words() -> list[str]:
    """Every word that is the value of some key."""
    told = msgspec.inspect.multi_type_info(Table.__subclasses__())
    fields = [field.type for table in told for field in getattr(table, "fields", ())]
    kinds = [kind for field in fields for kind in getattr(field, "types", (field,))]
    kinds = [getattr(kind, "item_type", kind) for kind in kinds]
    return [word for kind in kinds for word in getattr(kind, "values", ())]


def _bad_gpu(data: dict[str, object]) -> str:
    """Which of the named tables is not as it should be: the error only says that one is."""
    tables = data.get("gpus")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        try:
            msgspec.convert(table, GpuTable)
        except msgspec.ValidationError:
            return str(name)
    return "?"

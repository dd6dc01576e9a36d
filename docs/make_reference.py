"""Write the reference pages that the code knows: the protocol's table, errors, command line, cluster file.

    python docs/make_reference.py

A test fails when a page is not what this writes.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import sys
from pathlib import Path

os.environ["COLUMNS"] = "100"  # the width of the help pages, wherever this runs

import msgspec
from rich.console import Console

from kvferry import errors
from kvferry.cli import VERBS, app
from kvferry.plan import cluster_tables as cf
from kvferry.protocol import messages
from kvferry.protocol.table import (
    FINAL,
    IN_DOUBT,
    MESSAGES,
    ROWS,
    TRUTH,
    TRUTH_BY_DECODES_WORD,
    WAITS,
    Phase,
    Role,
    Row,
)
from kvferry.protocol.ticket import Mode

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/make_reference.py; change the code and run `make docs`. -->\n"


def protocol_page() -> str:
    """docs/protocol.md"""
    out = io.StringIO()
    print("# The protocol\n", file=out)
    print(NOTE, file=out)
    print(_first_paragraphs(sys.modules["kvferry.protocol.table"].__doc__), file=out)
    print("\n## Messages\n", file=out)
    print("| message | what it says |", "| --- | --- |", sep="\n", file=out)
    for kind in messages.Message.__args__:
        print(f"| {kind.__name__} | {_cell(kind.__doc__)} |", file=out)
    print("\n## What ends each wait\n", file=out)
    print("| phase | its clock |", "| --- | --- |", sep="\n", file=out)
    for phase in Phase:
        print(f"| {phase} | {'final' if phase in FINAL else WAITS[phase]} |", file=out)
    print("\n## What is true after a failure\n", file=out)
    print("| side | failed while | what is true then |", "| --- | --- | --- |", sep="\n", file=out)
    for (role, phase), truth in TRUTH.items():
        print(f"| {role} | {phase} | {truth} |", file=out)
    in_doubt = ", ".join(sorted(phase for _, phase in IN_DOUBT))
    print(f"| prefill | {in_doubt}, by decode's own word | {TRUTH_BY_DECODES_WORD} |", file=out)
    for role in Role:
        for mode in Mode:
            print(f"\n## {role.capitalize()}, {mode}\n", file=out)
            print("| phase | event | then | actions |", "| --- | --- | --- | --- |", sep="\n", file=out)
            for row in _rows(role, mode):
                then = "" if row.then is row.phase else row.then
                print(f"| {row.phase} | {row.event} | {then} | {', '.join(row.actions)} |", file=out)
            print(f"\nRefused in the other phases: {_refused(role, mode)}.", file=out)
    return out.getvalue()


def _rows(role: Role, mode: Mode) -> list[Row]:
    order = list(Phase)
    rows = [row for row in ROWS if (row.role, row.mode) == (role, mode) and row.phase not in FINAL]
    told = [row for row in rows if row.actions or row.then is not row.phase]
    return sorted(told, key=lambda row: (order.index(row.phase), row.event))


def _refused(role: Role, mode: Mode) -> str:
    meant = {row.event for row in _rows(role, mode)}
    never = sorted(event for event in MESSAGES if event not in meant)
    return "every message without a row; never meant for this seat: " + ", ".join(never)


def errors_page() -> str:
    """docs/errors.md"""
    out = io.StringIO()
    print("# Errors\n", file=out)
    print(NOTE, file=out)
    tree, rest = errors.__doc__.split("\n\n", 2)[1:]
    print("```\n" + tree + "\n```\n", file=out)
    print(rest, file=out)
    print("| type | kind | whose fault |", "| --- | --- | --- |", sep="\n", file=out)
    for kind, cls in errors.ERROR_KINDS.items():
        print(f"| {cls.__name__} | `{kind}` | {_cell(cls.__doc__)} |", file=out)
    print("\nExit status of the command line: 2 for InputError, 1 for every other.", file=out)
    return out.getvalue()


def cli_page() -> str:
    """docs/cli.md"""
    out = io.StringIO()
    print("# Command line\n", file=out)
    print(NOTE, file=out)
    print(sys.modules["kvferry.cli"].__doc__.split("\n\n", 1)[1], file=out)
    for verb in VERBS:
        # A verb may be a group of commands; each has its own page of help.
        for command in [[verb], *([verb, name] for name in app[verb] if not name.startswith("-"))]:
            screen = io.StringIO()
            console = Console(file=screen, width=100, color_system=None, legacy_windows=False)
            app.help_print(command, console=console)
            text = "\n".join(line.rstrip() for line in screen.getvalue().rstrip().splitlines())
            print(f"## kvferry {' '.join(command)}\n\n```text\n{text.strip()}\n```\n", file=out)
    return out.getvalue()


def _first_paragraphs(doc: str | None) -> str:
    return inspect.cleandoc(doc or "").replace("``", "`")


def _cell(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").split()).replace("``", "`").replace("|", "\\|")


# Where each table stands in the file; tables inside others are named by what holds them.
TABLES = {
    "(top)": cf.ClusterFile,
    "[slo]": cf.SloTable,
    "[workload]": cf.WorkloadTable,
    "[engine]": cf.EngineTable,
    "[plan]": cf.PlanTable,
    "[gpus.NAME]": cf.GpuTable,
    "a profile of profiles": cf.ProfileTable,
    "[[nodes]]": cf.NodeTable,
    "[links]": cf.LinksTable,
    "a link of links": cf.LinkTable,
    "[uplinks]": cf.UplinkTable,
    "[fleet]": cf.FleetTable,
    "a pool of fleet": cf.PoolTable,
}


def cluster_page() -> str:
    """docs/cluster-file.md"""
    out = io.StringIO()
    print("# The cluster file\n", file=out)
    print(NOTE, file=out)
    print(
        "What `kvferry plan` and `kvferry simulate` read: TOML. An unknown key is refused by its line, with",
        file=out,
    )
    print(
        "the nearest one that is known. `examples/cluster.toml`, which `kvferry plan` runs as it is:\n",
        file=out,
    )
    example = HERE.parent / "examples" / "cluster.toml"
    print(f"```toml\n{example.read_text('utf-8').strip()}\n```\n", file=out)
    print("## Every key\n", file=out)
    for name, table in TABLES.items():
        print(f"### {name}\n\n{_first_paragraphs(table.__doc__.partition('Args:')[0]).strip()}\n", file=out)
        said = dict(re.findall(r"^ +(\w+): (.+)$", table.__doc__.partition("Args:")[2], re.MULTILINE))
        print("| key | value | default | |", "| --- | --- | --- | --- |", sep="\n", file=out)
        for field in msgspec.inspect.type_info(table).fields:
            default = "needed" if field.required else _default(field)
            print(
                f"| `{field.encode_name}` | {_value(field.type)} | {default} | {said.get(field.name, '')} |",
                file=out,
            )
        print(file=out)
    return out.getvalue()


def _default(field: msgspec.inspect.Field) -> str:
    if field.default is None:
        return "none"
    if isinstance(field.default, cf.Table):
        return "left out"
    return f"`{json.dumps(field.default)}`"


def _value(kind: msgspec.inspect.Type) -> str:  # noqa: PLR0911 - one for each kind of type
    """A type in words, with its bounds."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        words = [_value(each) for each in kind.types if not isinstance(each, inspect.NoneType)]
        return ", or ".join(dict.fromkeys(words))
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{json.dumps(each)}`" for each in sorted(kind.values))
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        bounds = [(kind.ge, "from "), (kind.gt, "above "), (kind.le, "to ")]
        said = " ".join(f"{word}{bound:,}" for bound, word in bounds if bound is not None)
        whole = "whole number" if isinstance(kind, inspect.IntType) else "number"
        return f"{whole} {said}".strip()
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"list of: {_value(kind.item_type)}"
    if isinstance(kind, inspect.DictType):
        return f"tables by name: {_value(kind.value_type)}"
    names = {value: name for name, value in TABLES.items()}
    if isinstance(kind, inspect.StructType):
        return f"table: {names[kind.cls]}"
    return {inspect.BoolType: "`true` or `false`", inspect.StrType: "text"}[type(kind)]


PAGES = {
    "protocol.md": protocol_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
    "cluster-file.md": cluster_page,
}


def main() -> None:
    for name, make in PAGES.items():
        (HERE / name).write_text(make().rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    main()

"""Docs and code cannot part: generated pages are fresh, every verb, error, message and transport is named."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cyclopts import CycloptsError

import kvferry
from kvferry.cli import VERBS, app
from kvferry.engines.vllm.options import Options
from kvferry.errors import ERROR_KINDS, LocalError
from kvferry.plan.cluster_tables import Table
from kvferry.protocol import messages
from kvferry.transport.registry import known_schemes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METRICS = ("observe/prometheus.py", "serve/look.py", "proxy/metrics.py")
SHELL = {"|", ">", ">>", "<", "&", "&&", "||", ";", "2>&1"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def everything() -> str:
    return "\n".join(page.read_text("utf-8") for page in [ROOT / "README.md", *DOCS.rglob("*.md")])


@pytest.mark.parametrize("name", ["protocol.md", "errors.md", "cli.md", "cluster-file.md"])
def test_generated_pages_are_fresh(name: str) -> None:
    """A page that the code writes is what the code would write now."""
    pages = load(DOCS / "make_reference.py").PAGES
    assert (DOCS / name).read_text("utf-8") == pages[name]().rstrip() + "\n", "run `make docs`"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_readme(verb: str) -> None:
    """The README shows each verb once at least."""
    assert f"kvferry {verb}" in (ROOT / "README.md").read_text("utf-8")


def test_every_word_is_in_the_docs() -> None:
    """Each error type, message and transport is named somewhere a reader looks."""
    text = everything()
    words = {cls.__name__ for cls in ERROR_KINDS.values()}
    words |= {kind.__name__ for kind in messages.Message.__args__}
    words |= {f"`{scheme}`" for scheme in known_schemes()}
    assert not sorted(word for word in words if word not in text)


def test_links_inside_the_repository_lead_somewhere() -> None:
    """A relative link in any page names a file that exists, and a heading of it where it has a #."""
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
            path = page.parent / target if target else page
            if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """Names of its headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_decisions_are_numbered_once() -> None:
    """Each decision has a number of its own and a title."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    assert all(page.read_text("utf-8").startswith("# ") for page in pages)


@pytest.mark.parametrize("name", ["mistakes.md", "howto-size.md"])
def test_examples_are_what_the_commands_say(name: str) -> None:
    """The boxes of these pages show the output of today's commands."""
    assert (DOCS / name).read_text("utf-8") == load(DOCS / "make_examples.py").page(name), "run `make docs`"


def test_every_page_is_in_the_sites_navigation() -> None:
    """A page that nobody can find is no documentation."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w-]+\.md", nav))
    assert named == {page.name for page in DOCS.glob("*.md")}


def test_every_key_of_a_cluster_file_says_what_it_is() -> None:
    """Each key of each table has a row, and no row ends with an empty cell."""
    text = (DOCS / "cluster-file.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ?(.*) \|$", text, re.MULTILINE)
    tables = load(DOCS / "make_reference.py").TABLES.values()
    assert set(tables) == set(Table.__subclasses__())
    assert [name for name, _ in rows] == [name for table in tables for name in table.__struct_encode_fields__]
    assert not [name for name, said in rows if not said]


def test_every_setting_of_the_vllm_connector_and_every_metric_is_in_the_docs() -> None:
    """By name, in the page where a reader looks for it."""
    page = (DOCS / "vllm.md").read_text("utf-8")
    assert not [key for key in Options.__struct_fields__ if f"`{key}`" not in page]
    page = (DOCS / "observe.md").read_text("utf-8")
    code = "".join((ROOT / "src" / "kvferry" / name).read_text("utf-8") for name in METRICS)
    names = set(re.findall(r'"(kvferry_[a-z_]+)["{]', code))
    assert len(names) > 10
    assert not [name for name in names if f"`{name}" not in page]


def test_every_python_example_parses_and_names_what_there_is() -> None:
    """Each import of kvferry in a python box works, and each `kvferry.Name` exists."""
    boxes = 0
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for box in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            boxes += 1
            for node in ast.walk(ast.parse(box, page.name)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry"):
                    try:
                        module = importlib.import_module(node.module or "")
                    except LocalError:
                        continue  # an engine that is not installed here
                    assert not [name.name for name in node.names if not hasattr(module, name.name)], page.name
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kvferry":
                    assert hasattr(kvferry, node.attr), f"{page.name}: kvferry.{node.attr}"
    assert boxes > 5


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each kvferry command in a console box of a page, without what a shell does to it."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for box in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", box, re.MULTILINE):
                words = shlex.split(line.replace("\\\n", " "), comments=True)
                while words:
                    part = list(itertools.takewhile(lambda word: word not in SHELL, words))
                    words = words[len(part) + 1 :]
                    # Its own command, or what another one runs after --; not a name that a flag has.
                    at = next(
                        (
                            at
                            for at, word in enumerate(part)
                            if word.rpartition("/")[2] == "kvferry"
                            and (at == 0 or part[at - 1] in {"--", "sudo"})
                        ),
                        None,
                    )
                    if at is not None:
                        yield f"{page.name}: {line}", part[at + 1 :]


def test_every_command_in_the_docs_is_one() -> None:
    """Verbs, options and values in console boxes are known to the command line; nothing is run."""
    found = list(commands())
    assert len(found) > 40
    for shown, words in found:
        if words and words[0] not in {"--version", "--help", "--install-completion"}:
            try:
                app.parse_args(words, exit_on_error=False, print_error=False)
            except CycloptsError as error:
                pytest.fail(f"{shown}: {error}")


def test_no_row_of_a_table_stands_alone() -> None:
    """A blank line inside a table makes its rest a paragraph full of bars."""
    root = Path(__file__).parent.parent
    for path in (root / "README.md", *(root / "docs").rglob("*.md")):
        before, is_code = "", False
        lines = [*path.read_text("utf-8").splitlines(), ""]
        for number, (line, after) in enumerate(itertools.pairwise(lines), 1):
            is_code ^= line.startswith("```")
            if not is_code and line.startswith("|") and not before.startswith("|"):
                assert re.fullmatch(r"\|[\s:|-]+", after), f"{path}:{number}: a row without a head"
            before = line

"""Docs and code cannot part: generated pages are fresh, every verb, error, message and transport is named."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.cli import VERBS
from kvferry.errors import ERROR_KINDS
from kvferry.protocol import messages
from kvferry.transport.registry import known_schemes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


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


@pytest.mark.parametrize("name", ["protocol.md", "errors.md", "cli.md"])
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
    """A relative link in any page names a file that exists."""
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
        broken += [
            f"{page.relative_to(ROOT)}: {target}"
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        ]
    assert not broken


def test_decisions_are_numbered_once() -> None:
    """Each decision has a number of its own and a title."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    assert all(page.read_text("utf-8").startswith("# ") for page in pages)


def test_mistakes_are_what_the_commands_say() -> None:
    """The page of common mistakes shows the output of today's commands."""
    assert (DOCS / "mistakes.md").read_text("utf-8") == load(DOCS / "make_mistakes.py").page(), (
        "run `make docs`"
    )


def test_every_page_is_in_the_sites_navigation() -> None:
    """A page that nobody can find is no documentation."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w-]+\.md", nav))
    assert named == {page.name for page in DOCS.glob("*.md")}

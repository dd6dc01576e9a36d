"""A hook of mkdocs: links to files of the repository outside ``docs`` are text on the site."""

from __future__ import annotations

import re
from typing import Any

_FILES = r"src|tests|bench|examples|deploy|README\.md|CONTRIBUTING\.md"
_OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:\.\./)+(?:{_FILES})[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as the site builds it."""
    return _OUTSIDE.sub(r"\1", markdown)

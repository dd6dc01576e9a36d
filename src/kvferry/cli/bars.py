"""A progress bar for each stage of a verb, on stderr, gone at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Bars"]


class Bars:
    """Bars for stages: the library's name of each, and what a person reads; other ``columns``, if any."""

    def __init__(self, stages: Mapping[str, str], *columns: ProgressColumn) -> None:
        console = Console(stderr=True)
        self._stages = stages
        usual = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(
            *(columns or usual),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # in a log, bars would be noise
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, stage: str, done: float, total: float, text: str = "") -> None:
        """A stage got on; the text is for those who watch a stream of it, and for columns that show it."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(self._stages[stage], total=total, text=text)
        self._bars.update(self._tasks[stage], completed=done, total=total, text=text)

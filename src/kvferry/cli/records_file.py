"""Writes the records of a simulation as they come: CSV, or Parquet with pyarrow (extra ``plan``)."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_type_hints

from kvferry.cli.output import beside, check_out
from kvferry.errors import InputError, LocalError
from kvferry.plan.sim_request import RequestRecord

__all__ = ["RecordsFile"]

_BATCH = 8192


class RecordsFile:
    """A file of records; the suffix decides: ``.csv`` or ``.parquet``.

    Holds at most :data:`_BATCH` records. The file is there when the block has ended well; else what was there
    before is. Raises InputError for another suffix, without pyarrow, and for a file that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batch: list[RequestRecord] = []
        self._parquet: Any = None
        self._file: Any = None
        if path.suffix not in {".csv", ".parquet"}:
            raise InputError(f"records: {path}: is neither .csv nor .parquet")
        check_out(path, "records")
        self._part = beside(path)
        with self._writing():
            if path.suffix == ".csv":
                self._file = self._part.open("w", newline="", encoding="utf-8")
                csv.writer(self._file).writerow(RequestRecord._fields)
            else:
                self._parquet = _open_parquet(self._part)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"records: cannot write {self.path}: {error.strerror or error}") from error

    def add(self, record: RequestRecord) -> None:
        """Keep one record."""
        self._batch.append(record)
        if len(self._batch) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._batch:
            return
        with self._writing():
            if self._parquet is not None:
                columns = dict(zip(RequestRecord._fields, zip(*self._batch, strict=True), strict=True))
                self._parquet.write_batch(_record_batch(columns, self._parquet.schema))
            else:
                csv.writer(self._file).writerows(self._batch)
        self._batch.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None:
                    self._flush()
            finally:
                with self._writing():
                    (self._file or self._parquet).close()
            if kind is None and self._part != self.path:
                with self._writing():
                    self._part.replace(self.path)
        finally:
            if self._part != self.path:
                self._part.unlink(missing_ok=True)


_TYPES: dict[Any, str] = {int: "int64", float: "float64", str: "string", float | None: "float64"}


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise LocalError("records: Parquet needs pyarrow", next_step="pip install 'kvferry[plan]'") from error
    fields = [(name, _TYPES[kind]) for name, kind in get_type_hints(RequestRecord).items()]
    return pq.ParquetWriter(path, pa.schema([(name, getattr(pa, kind)()) for name, kind in fields]))


def _record_batch(columns: dict[str, tuple[object, ...]], schema: Any) -> Any:
    import pyarrow as pa

    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)

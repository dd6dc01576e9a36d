"""One structured log record for each transfer that ended, with its request and peer as fields."""

from __future__ import annotations

import json
import logging

import msgspec

from kvferry.transfer import Ended

__all__ = ["JsonLines", "Logs"]

_FIELD = "kvferry"


class Logs:
    """An observer: INFO for what went well, WARNING for what did not; ``record.kvferry`` has the fields."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("kvferry.transfers")

    def __call__(self, ended: Ended) -> None:
        """Log one transfer."""
        record = ended.record
        fields = {"request_id": record.request_id, "peer": record.peer, **msgspec.to_builtins(record)}
        if ended.error is None:
            self._logger.info(
                "%s %s with %s ended well", record.role, record.mode, record.peer, extra={_FIELD: fields}
            )
            return
        fields["error"] = msgspec.to_builtins(ended.error)
        self._logger.warning(
            "%s %s with %s failed: %s",
            *(record.role, record.mode, record.peer or "nobody", ended.error.message),
            extra={_FIELD: fields},
        )


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of ``Logs``."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELD, {}),
        }
        if record.exc_info:
            shown["traceback"] = self.formatException(record.exc_info)
        return json.dumps(shown)

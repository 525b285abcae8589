"""Logs of the collector's processes: one line an event, as text or as JSON."""

import logging
from datetime import UTC, datetime
from typing import Literal

import orjson

from agentlightning.proto.process import setup_logging

__all__ = ["FORMATS", "LogFormat", "setup_logs"]

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")


def setup_logs(component: str, level: str, form: LogFormat = "text") -> None:
    """Log to standard error."""
    setup_logging(component, level)
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_Json(component))


class _Json(logging.Formatter):
    """An object per line: time, level, component, logger, message, and error if there is a traceback."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        # Text that is no UTF-8 must not cost the line.
        return orjson.dumps({k: v.encode(errors="replace").decode() for k, v in line.items()}).decode()

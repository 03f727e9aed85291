"""Log lines for people (console) or machines (JSON); fields of ``extra`` are kept in both."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

#: What every record has; anything else came through ``extra``.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: uvicorn repeats its message here with terminal colours.
DROPPED = frozenset({"color_message"})
#: Libraries that log every request they make as INFO.
TALKATIVE = ("httpx2", "httpcore2", "huggingface_hub", "filelock", "asyncio")


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields a call gave as ``extra``, e.g. ``request_id``."""
    skipped = STANDARD | DROPPED
    return {key: value for key, value in vars(record).items() if key not in skipped}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """``12:30:59 INFO     logger: message key=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides logging's
        """The line without its traceback."""
        fields = "".join(f" {key}={value}" for key, value in extra_fields(record).items())
        return super().formatMessage(record) + fields


def configure_logging(level: str, log_format: str) -> None:
    """Send every logger's records to stderr in this format ("console" or "json")."""
    formatter: logging.Formatter = ConsoleFormatter()
    if log_format == "json":
        formatter = JsonFormatter()
        # Local time has no zone in it.
        formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))

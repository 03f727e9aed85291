"""Log lines for people (console) or machines (JSON); fields of ``extra`` are kept in both."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

#: What every record has; anything else came through ``extra``.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: What ``report`` and uncaught errors are logged as.
LOGGER = "mlx_parallm.cli"
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
    """Send every logger's records, and warnings, to stderr in this format ("console" or "json").

    It must be called once the libraries are imported: transformers and huggingface_hub give their
    loggers handlers of their own. With "json" the tracebacks of uncaught errors are records too.
    """
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
    _take_over_handlers()
    logging.captureWarnings(True)
    if is_json():
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread


def is_json() -> bool:
    """Return True if log lines are JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(one.formatter, JsonFormatter) for one in handlers)


def report(line: str) -> None:
    """Show why a command fails: a plain line on stderr, or a record where log lines are JSON."""
    if is_json():
        logging.getLogger(LOGGER).critical(line)
    else:
        print(line, file=sys.stderr)


def _take_over_handlers() -> None:
    """Let every logger's records go to the root's handler, and to no other."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger(LOGGER).critical("uncaught error", exc_info=(kind, error, trace))


def _log_uncaught_of_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None:
        _log_uncaught(told.exc_type, told.exc_value, told.exc_traceback)

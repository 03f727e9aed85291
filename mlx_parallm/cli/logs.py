"""Log lines for people (console) or machines (JSON); both include fields of ``extra``."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

#: ``STANDARD``: attributes of every record; all others come from ``extra``.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: ``LOGGER``: the logger's name for ``report`` and for uncaught errors.
LOGGER = "mlx_parallm.cli"
#: ``DROPPED``: fields in which uvicorn repeats its message with terminal colours.
DROPPED = frozenset({"color_message"})
SKIPPED = STANDARD | DROPPED
#: ``TALKATIVE``: libraries that log each of their requests at level INFO.
TALKATIVE = ("httpx2", "httpcore2", "huggingface_hub", "filelock", "asyncio")


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that a call passed as ``extra``, such as ``request_id``."""
    return {key: value for key, value in vars(record).items() if key not in SKIPPED}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time (UTC, ISO 8601), level, logger, message, extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
    """Formats lines such as ``12:30:59 INFO     logger: message key=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides logging's
        """Return the line without its traceback."""
        fields = "".join(f" {key}={value}" for key, value in extra_fields(record).items())
        return super().formatMessage(record) + fields


def configure_logging(level: str, log_format: str) -> None:
    """Send every logger's records, and warnings, to stderr in this format ("console" or "json").

    With "json", tracebacks of uncaught errors are records too.
    """
    formatter: logging.Formatter = ConsoleFormatter()
    if log_format == "json":
        formatter = JsonFormatter()
        # The format has no time zone, so UTC is used.
        formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    take_over_handlers()
    logging.captureWarnings(True)
    if is_json():
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread


def is_json() -> bool:
    """True if log lines are JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def report(line: str) -> None:
    """Show why a command fails, as a plain line on stderr, or as a record if log lines are JSON."""
    if is_json():
        logging.getLogger(LOGGER).critical(line)
    else:
        print(line, file=sys.stderr)


def show(text: str) -> None:
    """Print a text for people on stderr, unless log lines are JSON or only warnings are wanted."""
    if not is_json() and logging.getLogger().isEnabledFor(logging.INFO):
        print(text, end="", file=sys.stderr, flush=True)


def take_over_handlers() -> None:
    """Remove the handlers of all other loggers, so that the root's handler gets every record.

    Call it after libraries are imported: transformers and huggingface_hub add handlers then.
    """
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger(LOGGER).critical("uncaught error", exc_info=(kind, error, trace))


def _log_uncaught_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)

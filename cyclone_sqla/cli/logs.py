"""What the command line does with log records. The library itself only writes them.

A record is one line, whatever an action or a payload put into it: what is not printable is written
as an escape, so that no text can begin a line of its own or speak to the terminal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]

_STANDARD = frozenset(
    logging.LogRecord("", 0, "", 0, "", None, None).__dict__.keys()
    | {"message", "asctime", "taskName"}
)
"""What a record has without any ``extra``."""


def set_up(log_format: LogFormat, level: str, worker: str) -> None:
    """Write every record of this level and above to stderr; ``worker`` is the name of this process.

    An application that configures the root logger while it is imported overrides this.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format, worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def formatter(log_format: LogFormat, worker: str) -> logging.Formatter:
    """From a record to its line; an exception's text adds indented ones."""
    return _JsonLines(worker) if log_format == "json" else _TextLines(worker)


class _TextLines(logging.Formatter):
    """``2026-01-31 12:00:00.000+00:00 INFO    web-1  message``, with the job where there is one."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = _one_line(worker)

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone()
        head = f"{time.isoformat(sep=' ', timespec='milliseconds')} {record.levelname:<8}"
        line = f"{head} {self._worker}  {_one_line(self._text(record))}"
        return "\n".join([line, *(f"    {_one_line(part)}" for part in self._trace(record))])

    def _text(self, record: logging.LogRecord) -> str:
        """The message; who logged it, unless that is this library; the job, unless it says so."""
        text = _message(record)
        fields = dict(_extra(record))
        if "job_id" in fields and f"job {fields['job_id']}" not in text:
            text += "".join(f"  {name}={_text(value)}" for name, value in fields.items())
        is_own = record.name.startswith("cyclone_sqla.")
        return text if is_own else f"{record.name}: {text}"

    def _trace(self, record: logging.LogRecord) -> list[str]:
        """Indented, so that no line of an exception's text looks like a record."""
        return _trace(self, record).splitlines()


class _JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, worker, and the ``extra``."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(self._fields(record))
        for name, value in _extra(record):
            fields[name if name not in fields else f"{name}_"] = value
        return "{" + ", ".join(f"{_json(str(k))}: {_json(v)}" for k, v in fields.items()) + "}"

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, object]]:
        yield "time", datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        yield "level", record.levelname.lower()
        yield "logger", record.name
        yield "message", _message(record)
        yield "worker", self._worker
        if trace := _trace(self, record):
            yield "exception", trace


def _extra(record: logging.LogRecord) -> list[tuple[str, object]]:
    return [item for item in record.__dict__.items() if item[0] not in _STANDARD]


def _message(record: logging.LogRecord) -> str:
    """The text of a record, also of one whose arguments don't fit its format."""
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - arguments are anybody's objects
        return f"{_text(record.msg)} {_text(record.args)}"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts: list[str] = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _json(value: object) -> str:
    """The value as JSON, or its text as JSON where it has none."""
    try:
        return json.dumps(value, allow_nan=False)
    except Exception:  # noqa: BLE001 - a value of the application's may raise anything
        return json.dumps(_text(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as exc:  # noqa: BLE001 - as above
        return f"<{type(value).__name__} that can't be shown: {type(exc).__name__}>"


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

"""What commands print for programs: one JSON document, with the names of the API."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import click
import sqlalchemy as sa

from cyclone_sqla.explanations import Explanation, Reason
from cyclone_sqla.models import JobRow

JSON_TEXTS = ("arguments", "result", "details")
"""What is stored as JSON text, and shown as the JSON that it is."""


def print_json(document: object) -> None:
    """Print one document. What a terminal would obey, and JSON lets stand, is escaped too."""
    text = json.dumps(plain(document), indent=2, ensure_ascii=False)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def plain(value: Any) -> Any:
    """A value of the API as JSON: times in UTC (ISO 8601), durations in seconds."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, JobRow):
        names = [column.key for column in sa.inspect(type(value)).column_attrs]
        return _named({name: getattr(value, name) for name in names})
    if is_dataclass(value):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return _named({**_told_by(value), **given})
    if isinstance(value, Mapping):
        named = cast("Mapping[object, object]", value)
        return {str(name): plain(each) for name, each in named.items()}
    if isinstance(value, Collection) and not isinstance(value, str):
        return [plain(each) for each in cast("Collection[object]", value)]
    return value


def _told_by(value: object) -> dict[str, Any]:
    """What the value says of itself beyond its fields."""
    if isinstance(value, Reason):
        return {"code": value.code, "sentence": value.sentence}
    if isinstance(value, Explanation):
        return {"reason": value.reason, "text": value.text}
    return {}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: loaded(value) if name in JSON_TEXTS else plain(value)
        for name, value in values.items()
    }


def loaded(text: Any) -> Any:
    """The value of a JSON text; what is none, as it is."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text

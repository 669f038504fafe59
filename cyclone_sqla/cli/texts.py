"""Values as texts for people."""

from __future__ import annotations

from datetime import UTC, datetime

from cyclone_sqla.figures import Count


def shown(value: object) -> str:
    """A value as text of one line, times in UTC; what a terminal would obey is made visible."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(time: datetime | None) -> str | None:
    """A time as a table has room for: month, day and minute, in UTC."""
    return None if time is None else f"{time.astimezone(UTC):%m-%d %H:%M}"


def brief(count: Count) -> str:
    """A count for a narrow column: 10,000+ is "10,000 or more"."""
    return f"{count.number:,}" + ("" if count.is_exact else "+")


def in_state(state: str, waits_for: str | None) -> str:
    """ "available", "pending: turn"."""
    return state if waits_for is None else f"{state}: {waits_for}"


def paused_by(who: str | None) -> str:
    """Of a queue or sequence that is paused, in a note."""
    return "paused" + (f" by {who}" if who else "")

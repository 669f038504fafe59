"""Where "now" comes from: one clock for due times, leases, deadlines and backoff.

By default "now" is the database's clock on a server and the host's clock on SQLite. A test installs
one clock of its own, and then every statement is given that time: never a mix.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of the present time."""

    def now(self) -> datetime | None:
        """The present time, timezone-aware, or None for the database's own clock."""
        ...


class DatabaseClock:
    """The default: the database decides (on SQLite: the host that runs the statement)."""

    def now(self) -> datetime | None:
        """None: the statement asks the database."""
        return None

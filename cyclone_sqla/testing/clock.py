"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """The present time of a test: for due times, leases, deadlines and backoff.

    It starts at ``start`` (aware), or at the real time, to the microsecond.
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = datetime.now(UTC)
        if start is not None:
            self.set(start)

    def now(self) -> datetime:
        """The present time, aware, in UTC."""
        return self._now

    def advance(self, by: timedelta) -> None:
        """Let time pass. ValueError for a negative duration."""
        if by < timedelta(0):
            raise ValueError(f"a clock doesn't run back: {by}")
        self._now += by

    def set(self, now: datetime) -> None:
        """Make it this time. ValueError for one without a time zone."""
        if now.tzinfo is None:
            raise ValueError("the time needs a time zone, like datetime.now(UTC)")
        self._now = now.astimezone(UTC)

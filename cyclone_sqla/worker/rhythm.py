"""When the duties of a worker have their turn, and whether it was in touch meanwhile."""

from __future__ import annotations

import threading
import time


class Rhythm:
    """The turns of one duty: the first after ``first`` seconds, then one every ``interval``.

    A turn that is not :meth:`done`, because it failed, comes again at once. Turns are counted from
    their beginnings, so that slow ones don't drift apart.
    """

    def __init__(self, interval: float, ending: threading.Event, *, first: float = 0.0) -> None:
        self._interval = interval
        self._ending = ending
        self._next = self._began = time.monotonic() + first

    def wait(self) -> bool:
        """Sleep until the next turn; False if the worker ends instead."""
        while (left := self._next - time.monotonic()) > 0:
            if self._ending.wait(left):
                break
        self._began = time.monotonic()
        return not self._ending.is_set()

    def done(self) -> None:
        """This turn is over; the next one comes an interval after its beginning."""
        self._next = self._began + self._interval

    def again(self, seconds: float) -> None:
        """This turn is over; the next one comes in so many seconds."""
        self._next = time.monotonic() + seconds


class Alarm:
    """A sleep that others may shorten."""

    def __init__(self) -> None:
        self._at = float("inf")
        self._changed = threading.Condition()

    def set(self, seconds: float) -> None:
        """End the present or the next sleep in this many seconds."""
        with self._changed:
            self._at = min(self._at, time.monotonic() + seconds)
            self._changed.notify()

    def sleep(self, seconds: float) -> None:
        """Sleep for up to ``seconds``."""
        give_up = time.monotonic() + seconds
        with self._changed:
            while (left := min(give_up, self._at) - time.monotonic()) > 0:
                self._changed.wait(left)
            self._at = float("inf")


class Contact:
    """Whether this worker has been in touch with the database lately, without a longer gap."""

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._heard_at = _now()
        self._back_since = float("-inf")

    def note(self) -> None:
        """The database has answered."""
        now = _now()
        if now - self._heard_at > self._longest_gap:
            self._back_since = now
        self._heard_at = now

    def is_fresh(self, seconds: float) -> bool:
        """Whether the database has answered within so many seconds."""
        return _now() - self._heard_at <= seconds

    def has_lasted(self, seconds: float) -> bool:
        """Whether the latest gap ended at least so long ago."""
        return _now() - self._back_since >= seconds


def _now() -> float:
    """Seconds that go on while the host sleeps, where there is such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)

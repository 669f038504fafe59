"""How a run ends: the values that the executor returns and the settler writes, and the three
exceptions by which an action says how it wants to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from cyclone_sqla.failures import Failure


class Retry(Exception):
    """Raised by an action: this attempt failed, run the job again.

    ``in_`` is the delay (a timedelta, or seconds); without it the action's backoff decides. Counts
    towards ``max_attempts``. ``raise Retry(...) from exc`` records the cause.
    """

    def __init__(self, message: str = "", *, in_: timedelta | float | None = None) -> None:
        super().__init__(message or "retry asked for by the action")
        self.in_ = as_delay(in_)


class Snooze(Exception):
    """Raised by an action: not now, run the job again after ``in_`` (a timedelta, or seconds).

    Does not count towards ``max_attempts``. What the action wrote through its session is rolled
    back, unless ``keep_writes`` is set: then it commits together with this end.
    """

    def __init__(
        self, message: str = "", *, in_: timedelta | float, keep_writes: bool = False
    ) -> None:
        super().__init__(message or "snoozed by the action")
        delay = as_delay(in_)
        assert delay is not None
        self.in_ = delay
        self.keep_writes = keep_writes


class Discard(Exception):
    """Raised by an action: this job can never succeed; discard it with this reason.

    What the action wrote through its session is rolled back, unless ``keep_writes`` is set: then it
    commits together with this end.
    """

    def __init__(self, reason: str, *, keep_writes: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.keep_writes = keep_writes


class Cancelled(Exception):
    """Raised by :meth:`Context.raise_if_cancelled`: the run was asked to stop."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The action returned; ``result`` is its JSON text, or None for no result."""

    result: str | None = None
    failure: Failure | None = None
    """A result that could not be kept is reported here; the job is completed all the same."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed and another one follows after ``delay``; ``crashed`` if its worker was
    lost.
    """

    delay: timedelta
    failure: Failure
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The action asked to be run again after ``delay``; not counted as an attempt."""

    delay: timedelta
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Discarded:
    """The job ends without success; ``failure`` says why."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class CancelledOutcome:
    """The run ended because cancellation was asked for."""

    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Claimed but never started: available again, with its attempt returned."""


Outcome: TypeAlias = Completed | Retried | Snoozed | Discarded | CancelledOutcome | GivenBack


def as_delay(value: timedelta | float | None) -> timedelta | None:
    """A delay of zero or more; seconds are taken as a number. ValueError for anything else."""
    if value is None or isinstance(value, timedelta):
        delay = value
    else:
        try:
            delay = timedelta(seconds=value)
        except (OverflowError, ValueError) as exc:
            raise ValueError(f"in_ must be a finite delay, not {value!r}") from exc
    if delay is not None and delay < timedelta(0):
        raise ValueError(f"in_ must not be negative, not {delay}")
    return delay

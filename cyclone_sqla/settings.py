"""A worker's settings, checked when they are given. Durations are seconds."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import cast

from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.keys import text_fault

DEFAULT_CONCURRENCY = 10
MIN_LEASE = 1.0

ALIVE_WITHIN = 60.0
"""A worker of which nothing was heard for so many seconds is presumed dead by those who look."""

_DAY = 86_400.0

MAX_SECONDS = 36_525 * _DAY
"""A hundred years: no thread can be told to wait for three hundred."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker works. All durations are in seconds.

    ``queues`` maps a queue to its slots (runs at the same time); None serves every queue of the
    registered actions with ``concurrency`` slots each. ``lease`` is how long a run may go unrenewed
    before another worker may take its job; it is renewed at a third of that. ``poll`` bounds how
    late work is noticed when no hint arrives. ``listen_url`` is a direct way to PostgreSQL for
    LISTEN where the main one goes through a transaction pooler; ``prepare=False`` keeps psycopg
    from preparing statements, which such poolers may not carry. ``name`` is what people know the
    worker by, host and process if it is left out. ``single_instance`` (SQLite alone) refuses to
    start beside another worker on the same file and keeps others out; as nobody else can be at
    work then, it runs again at once, without waiting for leases, what a crashed one left running.
    ``max_jobs`` and ``max_memory`` (bytes) have :meth:`Worker.run` end, when its runs have, after
    so many runs or beyond so much resident memory, for a fresh process to take its place.
    ``query_timeout`` (PostgreSQL) is how long the worker waits for an answer to a step of its own;
    then it connects anew. Queries of actions are not limited by it.
    ``keep_*`` are the retentions of ended jobs, None for ever.
    """

    queues: Mapping[str, int] | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    poll: float = 0.5
    lease: float = 60.0
    rescue_interval: float = 10.0
    rescue_limit: int = 100
    grace: float = 30.0
    listen: bool = True
    listen_url: str | None = field(default=None, repr=False)  # it may hold a password
    prepare: bool = True
    name: str | None = None
    single_instance: bool = False
    max_jobs: int | None = None
    max_memory: int | None = None
    lock_timeout: float = 10.0
    query_timeout: float = 30.0
    sqlite_synchronous: str = "NORMAL"
    history_limit: int = 25
    keep_completed: float | None = _DAY
    keep_cancelled: float | None = 7 * _DAY
    keep_discarded: float | None = 30 * _DAY
    prune_dead_letters: float | None = None
    idempotency_retention: float = 30 * _DAY
    prune_interval: float = 60.0

    def __post_init__(self) -> None:
        """Raises ConfigurationError naming the setting."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "float" or (each.type == "float | None" and value is not None):
                _check_seconds(each.name, value)
        for name in ("concurrency", "rescue_limit", "history_limit"):
            _check_count(name, getattr(self, name))
        _check_share(self.max_jobs, self.max_memory)
        _check_queues(self.queues)
        for name in ("name", "listen_url", "sqlite_synchronous"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.lease < MIN_LEASE:
            raise ConfigurationError(
                f"lease: at least {MIN_LEASE:g} s, so that it can be renewed in time"
            )
        if str(self.sqlite_synchronous).upper() not in ("NORMAL", "FULL", "EXTRA"):
            raise ConfigurationError("sqlite_synchronous: NORMAL, FULL or EXTRA")

    @property
    def lease_length(self) -> timedelta:
        """The lease as a duration."""
        return timedelta(seconds=self.lease)

    @property
    def renew_interval(self) -> float:
        """Seconds between renewals: one that is lost does no harm."""
        return self.lease / 3

    @property
    def report_interval(self) -> float:
        """Seconds between a worker's signs of life: three, before it is presumed dead."""
        return min(self.renew_interval, ALIVE_WITHIN / 3)

    @property
    def effective_lock_timeout(self) -> float:
        """Seconds that a step waits for SQLite's write lock: a renewal must come in time."""
        return min(self.lock_timeout, self.lease / 3)

    @property
    def renewal_timeout(self) -> float:
        """Seconds for an answer to a renewal: another connection can still be in time."""
        return min(self.query_timeout, self.lease / 2)


def parse_queues(text: str) -> dict[str, int | None]:
    """``ledger:5,mail`` as {"ledger": 5, "mail": None}.

    A name with a colon needs its slots given.
    """
    queues: dict[str, int | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(.+):(\d+)", part)
        name, slots = (match[1], int(match[2])) if match else (part, None)
        if name in queues:
            raise ConfigurationError(f"queues: {name!r} is given twice")
        queues[name] = slots
    if not queues:
        raise ConfigurationError("queues: name at least one, like ledger:5,mail:20")
    return queues


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name}: a number of seconds, not {reprlib.repr(value)}")
    is_zero_fit = name == "grace" or name.startswith("keep_")
    if not 0 <= value <= MAX_SECONDS or (value == 0 and not is_zero_fit):
        least = "0 or more" if is_zero_fit else "above 0"
        raise ConfigurationError(
            f"{name}: a number of seconds, {least} and at most a hundred years, "
            f"not {reprlib.repr(value)}"
        )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        given = reprlib.repr(value)
        raise ConfigurationError(f"{name}: a whole number from 1 to 1,000,000, not {given}")


def _check_text(name: str, value: object) -> None:
    fault = text_fault(value)
    if fault is not None:
        raise ConfigurationError(f"{name}: {fault}")


def _check_queues(queues: object) -> None:
    if queues is None:
        return
    if not isinstance(queues, Mapping):
        raise ConfigurationError(f"queues: names and their slots, not {reprlib.repr(queues)}")
    for queue, slots in cast("Mapping[object, object]", queues).items():
        name = f"queues[{reprlib.repr(queue)}]"
        _check_text(name, queue)
        _check_count(name, slots)


def _check_share(max_jobs: object, max_memory: object) -> None:
    for name, value in (("max_jobs", max_jobs), ("max_memory", max_memory)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigurationError(f"{name}: a whole number above 0, not {reprlib.repr(value)}")


DEFAULT_SETTINGS = WorkerSettings()
"""What a worker does unless it is told otherwise."""

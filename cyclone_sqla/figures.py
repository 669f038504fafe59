"""What is said of queues, sequences, workers and jobs when somebody looks: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cyclone_sqla.lifecycle import State, WaitsFor

MOST_COUNTED = 1_000
"""How far jobs are counted where a backlog of any size may stand: "1,000 or more"."""

WINDOW = 10_000
"""The same for figures of a whole database, whose parts are counted one by one."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number of jobs, counted up to a bound: then it is "1,000 or more", not a number."""

    number: int
    is_exact: bool = True

    @classmethod
    def up_to(cls, bound: int, number: int) -> Count:
        """What was counted in a look that ended at ``bound``."""
        return cls(number, number < bound)

    def __add__(self, other: Count) -> Count:
        return Count(self.number + other.number, self.is_exact and other.is_exact)

    def __str__(self) -> str:
        return f"{self.number:,}" + ("" if self.is_exact else " or more")

    def of_jobs(self) -> str:
        """ "1 job", "1,000 or more jobs"."""
        return f"{self} job" + ("" if self == Count(1) else "s")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """A queue as it is now.

    ``jobs`` counts by state, each up to :data:`WINDOW` or a little more. ``waits_since`` is since
    when the longest waiting of its first available jobs (the first of each kind and priority) could
    have run. ``workers`` are the live ones that serve it, ``slots`` how many of its jobs they run
    at the same time.
    """

    name: str
    jobs: Mapping[State, Count]
    waits_since: datetime | None
    paused_at: datetime | None
    paused_by: str | None
    workers: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The job at the head of a sequence. ``since``: when it came into its state, or was claimed."""

    id: int
    kind: str
    queue: str
    state: State
    waits_for: WaitsFor | None
    since: datetime
    run_at: datetime
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFigures:
    """A sequence as it is now.

    ``head`` is None while a worker hands the place on, or a position is missing. ``waiting`` counts
    the jobs behind it, up to :data:`MOST_COUNTED`. ``is_halted`` says that the head stops it until
    a person replays or skips it. ``released_through`` is there if its jobs have positions.
    """

    key: str
    head: Head | None
    waiting: Count
    is_halted: bool
    paused_at: datetime | None
    paused_by: str | None
    released_through: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltedSequence:
    """A sequence that stands until a person replays or skips its head.

    ``why`` is the head's last error, or who cancelled it; ``since`` when that was. ``waiting``
    counts the jobs behind it, up to :data:`MOST_COUNTED`.
    """

    key: str
    head: int
    kind: str
    state: State
    why: str
    since: datetime
    waiting: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """A worker by its own account. It is taken for dead if nothing was heard of it for a minute."""

    id: str
    name: str
    host: str
    pid: int
    queues: Mapping[str, int]
    kinds: tuple[str, ...]
    started_at: datetime
    seen_at: datetime
    is_alive: bool

    def slots_of(self, queue: str) -> int:
        """How many jobs of the queue it runs at the same time; 0 if it doesn't serve it."""
        return self.queues.get(queue, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A whole database as it is now; every count ends at :data:`WINDOW` or a little more.

    ``pending`` divides the pending jobs by what they wait for. ``waits_since``: as in
    :class:`QueueFigures`.
    """

    jobs: Mapping[State, Count]
    pending: Mapping[WaitsFor, Count]
    dead_letters: Count
    halted_sequences: Count
    paused_queues: tuple[str, ...]
    waits_since: datetime | None
    workers: tuple[WorkerFigures, ...]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One entry of a job's history: a failed attempt, a rescue, a person's act.

    ``details`` is JSON text: of a failure its traceback and causes.
    """

    at: datetime
    event: str
    attempt: int | None
    worker: str | None
    actor: str | None
    error: str | None
    details: str | None

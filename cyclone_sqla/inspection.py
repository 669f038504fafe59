"""What there is: queues, sequences, workers and jobs as they are now. Read-only, and bounded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import statements
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import JobNotFoundError
from cyclone_sqla.figures import (
    MOST_COUNTED,
    WINDOW,
    Count,
    HaltedSequence,
    Head,
    JobEvent,
    QueueFigures,
    SequenceFigures,
    Stats,
    WorkerFigures,
)
from cyclone_sqla.inspection_statements import MOST_GROUPS
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.line_statements import KEYS
from cyclone_sqla.settings import ALIVE_WITHIN

# ---- one job -------------------------------------------------------------------------------------


def history(connection: Connection, dialect: Dialect, job_id: int) -> list[JobEvent]:
    """What is written down of a job, the oldest first."""
    rows = connection.execute(dialect.looks.history, {"job_id": job_id}).all()
    return [JobEvent(*row) for row in reversed(rows)]


def id_at(connection: Connection, dialect: Dialect, key: str, position: int) -> int:
    """The id of the job at a position of a sequence.

    Raises JobNotFoundError: it has not been enqueued, or retention has removed it.
    """
    given = {"key": key, "position": position}
    job_id: int | None = connection.scalar(dialect.looks.at_position, given)
    if job_id is not None:
        return job_id
    sequence = connection.execute(dialect.looks.sequence, {"key": key}).first()
    through = (sequence.released_through if sequence is not None else None) or 0
    gone = "it is over, and retention has removed it" if 0 < position <= through else "no such job"
    raise JobNotFoundError(f"position {position} of sequence {key!r}: {gone}")


# ---- workers -------------------------------------------------------------------------------------


def workers(connection: Connection, dialect: Dialect) -> list[WorkerFigures]:
    """The workers that have a record, those presumed dead too."""
    rows = connection.execute(dialect.looks.workers, {"now": dialect.now()})
    return [
        WorkerFigures(
            id=row.id,
            name=row.name,
            host=row.host,
            pid=row.pid,
            queues=row.queues,
            kinds=tuple(row.kinds),
            started_at=row.started_at,
            seen_at=row.seen_at,
            is_alive=row.now - row.seen_at <= timedelta(seconds=ALIVE_WITHIN),
        )
        for row in rows
    ]


# ---- queues and the whole ------------------------------------------------------------------------


def queues(connection: Connection, dialect: Dialect) -> list[QueueFigures]:
    """Every queue that has jobs, is paused, or is served by a live worker; by name."""
    tally = _tally(connection, dialect)
    paused = {row.name: row for row in connection.execute(dialect.looks.paused_queues)}
    live = [worker for worker in workers(connection, dialect) if worker.is_alive]
    served = {queue for worker in live for queue in worker.queues}
    return [
        QueueFigures(
            name=name,
            jobs=tally.by_state(name),
            waits_since=tally.since.get(name),
            paused_at=paused[name].paused_at if name in paused else None,
            paused_by=paused[name].paused_by if name in paused else None,
            workers=sum(1 for worker in live if worker.slots_of(name)),
            slots=sum(worker.slots_of(name) for worker in live),
        )
        for name in sorted(tally.queues() | paused.keys() | served)
    ]


def stats(connection: Connection, dialect: Dialect) -> Stats:
    """A database at a glance."""
    tally = _tally(connection, dialect)
    halted: int = connection.execute(dialect.looks.halted_count).scalar_one()
    return Stats(
        jobs=tally.by_state(),
        pending={waits_for: tally.pending(waits_for) for waits_for in WaitsFor},
        dead_letters=tally.size_of("dead"),
        halted_sequences=Count.up_to(WINDOW, halted),
        paused_queues=tuple(row.name for row in connection.execute(dialect.looks.paused_queues)),
        waits_since=min(tally.since.values(), default=None),
        workers=tuple(workers(connection, dialect)),
    )


_PARTS: Mapping[State, Collection[str]] = {
    State.PENDING: ("due", "incoming", "line"),
    State.AVAILABLE: ("available",),
    State.RUNNING: ("running",),
    State.PAUSED: ("paused",),
    State.COMPLETED: ("completed", "debt"),
    State.DISCARDED: ("discarded", "dead", "debt"),
    State.CANCELLED: ("cancelled", "line", "debt"),
}
"""In which windows the jobs of a state stand: where one of them is full, a count is a bound."""

_PENDING_PARTS: Mapping[WaitsFor, str] = {
    WaitsFor.TIME: "due",
    WaitsFor.RETRY: "due",
    WaitsFor.ADMISSION: "incoming",
    WaitsFor.TURN: "line",
}


@dataclass(slots=True)
class _Tally:
    """Jobs by queue, state and what they wait for, as far as they were counted."""

    numbers: dict[tuple[str, State, WaitsFor | None], int] = field(
        default_factory=dict[tuple[str, State, "WaitsFor | None"], int]
    )
    since: dict[str, datetime] = field(default_factory=dict[str, datetime])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    full: set[str] = field(default_factory=set[str])

    def add(self, row: sa.Row[Any]) -> None:
        """Count what stands in one window only, of one queue, state and waiting."""
        key = (row.queue, State(row.state), row.waits_for and WaitsFor(row.waits_for))
        self.numbers[key] = self.numbers.get(key, 0) + row.number

    def size_of(self, window: str) -> Count:
        """All that stands in a window."""
        return Count.up_to(WINDOW, self.sizes.get(window, 0))

    def queues(self) -> set[str]:
        return {queue for queue, _, _ in self.numbers}

    def by_state(self, queue: str | None = None) -> dict[State, Count]:
        """Of one queue, or of all."""
        return {
            state: Count(
                sum(
                    number
                    for (of, is_, _), number in self.numbers.items()
                    if is_ == state and queue in (None, of)
                ),
                self.full.isdisjoint(parts),
            )
            for state, parts in _PARTS.items()
        }

    def pending(self, waits_for: WaitsFor) -> Count:
        number = sum(n for (_, _, waits), n in self.numbers.items() if waits == waits_for)
        return Count(number, _PENDING_PARTS.get(waits_for) not in self.full)


def _tally(connection: Connection, dialect: Dialect) -> _Tally:
    tally = _Tally()
    windows = connection.execute(dialect.looks.windows).all()
    for row in windows:
        tally.sizes[row.part] = tally.sizes.get(row.part, 0) + row.number
        if _counts(row):
            tally.add(row)
    tally.full = {part for part, size in tally.sizes.items() if size >= WINDOW}
    _tally_available(tally, connection.execute(dialect.looks.available).all())
    return tally


def _counts(row: sa.Row[Any]) -> bool:
    """Whether a row of a window stands in no other: in line only those that wait for their turn or
    were cancelled, of debts none that is a dead letter.
    """
    if row.part == "line":
        waits: str | None = row.waits_for
        return waits == WaitsFor.TURN or State(row.state) == State.CANCELLED
    is_dead_letter: bool = row.dead_letter is not None
    return row.part != "debt" or not is_dead_letter


def _tally_available(tally: _Tally, groups: Sequence[sa.Row[Any]]) -> None:
    for row in groups:
        key = (row.queue, State.AVAILABLE, None)
        tally.numbers[key] = tally.numbers.get(key, 0) + row.number
        tally.since[row.queue] = min(row.since, tally.since.get(row.queue, row.since))
    if len(groups) >= MOST_GROUPS or any(row.number >= WINDOW for row in groups):
        tally.full.add("available")


# ---- sequences -----------------------------------------------------------------------------------


def sequences(
    connection: Connection, dialect: Dialect, after: str, limit: int, *, only_paused: bool
) -> list[SequenceFigures]:
    """The next sequences after a key that have jobs, or the next paused ones."""
    statement = dialect.looks.paused_keys if only_paused else dialect.looks.keys_in_line
    keys = connection.scalars(statement, {"after": after, "limit": limit}).all()
    return lines(connection, dialect, keys)


def lines(connection: Connection, dialect: Dialect, keys: Collection[str]) -> list[SequenceFigures]:
    """These sequences, in this order."""
    bound = dialect.syntax.bind("keys", KEYS, [(key,) for key in keys])
    rows = {row.key: row for row in connection.execute(dialect.looks.lines, bound)}
    ids = [row.head for row in rows.values() if row.head is not None]
    heads = {row.sequence_key: row for row in _heads(connection, dialect, ids)}
    return [_line(rows[key], heads.get(key)) for key in keys]


def _heads(connection: Connection, dialect: Dialect, ids: Iterable[int]) -> list[sa.Row[Any]]:
    bound = dialect.syntax.bind("wanted", statements.ID, [(job_id,) for job_id in ids])
    return list(connection.execute(dialect.looks.heads, {**bound, "now": dialect.now()}).all())


def _line(row: sa.Row[Any], head: sa.Row[Any] | None) -> SequenceFigures:
    is_open = head is not None and head.sequence_open is not None
    return SequenceFigures(
        key=row.key,
        head=head_of(head) if head is not None and is_open else None,
        waiting=Count.up_to(MOST_COUNTED, row.number - is_open),
        is_halted=head is not None and is_open and State(head.state).is_terminal,
        paused_at=row.paused_at,
        paused_by=row.paused_by,
        released_through=row.released_through,
    )


def head_of(row: sa.Row[Any]) -> Head:
    """A head from its facts."""
    return Head(
        id=row.id,
        kind=row.kind,
        queue=row.queue,
        state=State(row.state),
        waits_for=row.waits_for and WaitsFor(row.waits_for),
        since=since_of(row),
        run_at=row.run_at,
        last_error=row.last_error,
    )


def since_of(row: sa.Row[Any]) -> datetime:
    """Since when a job is in its state: a renewal of its lease does not count."""
    since: datetime | None = {
        State.RUNNING: row.started_at,
        **dict.fromkeys((State.COMPLETED, State.DISCARDED, State.CANCELLED), row.finished_at),
    }.get(State(row.state))
    updated: datetime = row.updated_at
    return since or updated


def halted_sequences(
    connection: Connection, dialect: Dialect, after: int, limit: int
) -> list[HaltedSequence]:
    """The next sequences that stand, by the ids of their heads."""
    rows = connection.execute(dialect.looks.halted, {"after": after, "limit": limit})
    return [
        HaltedSequence(
            key=row.sequence_key,
            head=row.id,
            kind=row.kind,
            state=State(row.state),
            why=why_halted(State(row.state), row.last_error, row.actor),
            since=row.finished_at,
            waiting=Count.up_to(MOST_COUNTED, row.number - 1),
        )
        for row in rows
    ]


def why_halted(state: State, error: str | None, actor: str | None) -> str:
    """Why a head halts its sequence, in a few words."""
    if state == State.CANCELLED:
        return "cancelled" + (f" by {actor}" if actor else "")
    return error or "no error recorded"

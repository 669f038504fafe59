"""Why a job isn't running: looks at what could hold it, in the order in which it must be cleared.

Each look reads a few rows through an index, however long the line or the queue is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import inspection
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import JobNotFoundError
from cyclone_sqla.explanations import (
    BehindHead,
    Delayed,
    Ended,
    Explanation,
    Gap,
    HandOver,
    Incoming,
    NoWorker,
    Paused,
    Reason,
    Retrying,
    Running,
    Saturated,
    SequenceHalted,
    UnknownKind,
    Unpositioned,
    WaitingForWorker,
    WaitsForDependencies,
    WorkerLost,
)
from cyclone_sqla.figures import MOST_COUNTED, Count, WorkerFigures
from cyclone_sqla.lifecycle import State, WaitsFor


def explain(connection: Connection, dialect: Dialect, job_id: int) -> Explanation:
    """All that keeps a job from running, or that it runs, or what became of it.

    Raises JobNotFoundError.
    """
    given = {"job_id": job_id, "now": dialect.now()}
    row = connection.execute(dialect.looks.job_facts, given).first()
    if row is None:
        raise JobNotFoundError(f"there is no job {job_id} in this database")
    return Explanation(
        job_id=row.id,
        kind=row.kind,
        queue=row.queue,
        state=State(row.state),
        waits_for=row.waits_for and WaitsFor(row.waits_for),
        reasons=_Look(connection, dialect).at(row),
    )


@dataclass(slots=True)
class _Look:
    """One look at a job and at all that could hold it."""

    connection: Connection
    dialect: Dialect

    def at(self, job: sa.Row[Any]) -> tuple[Reason, ...]:
        """Its reasons."""
        state = State(job.state)
        if state.is_terminal:
            return (self._ended(job),)
        if state == State.RUNNING:
            return (self._running(job),)
        reasons = tuple(self._obstacles(job))
        return (*reasons, *self._of_workers(job, is_free=not reasons))

    def _obstacles(self, job: sa.Row[Any]) -> Iterator[Reason]:
        if job.state == State.PAUSED:
            at, by = self._last_act(job, "pause")
            yield Paused(what="job", since=at or job.updated_at, by=by)
        if job.waits_for == WaitsFor.DEPENDENCIES:
            yield WaitsForDependencies()
        if job.sequence_key is not None:
            yield from self._of_sequence(job)
        if job.run_at > job.now or job.waits_for in (WaitsFor.TIME, WaitsFor.RETRY):
            yield _time(job)
        queue = self._one(self.dialect.looks.queue, queue=job.queue)
        if queue is not None and queue.paused_at is not None:
            yield Paused(what="queue", name=job.queue, since=queue.paused_at, by=queue.paused_by)

    # ---- its sequence ----------------------------------------------------------------------------

    def _of_sequence(self, job: sa.Row[Any]) -> Iterator[Reason]:
        """A pause of the sequence comes first: it holds back those before the job, too."""
        key = job.sequence_key
        sequence = self._one(self.dialect.looks.sequence, key=key)
        is_paused = sequence is not None and sequence.paused_at is not None
        if sequence is not None and is_paused:
            yield Paused(what="sequence", name=key, since=sequence.paused_at, by=sequence.paused_by)
        through = None if sequence is None else sequence.released_through
        if through is not None and job.position is None and job.admitted is None:
            yield Unpositioned(key=key)
        elif job.admitted is None:
            yield from self._of_line(job, through or 0)
        elif job.waits_for == WaitsFor.TURN and not is_paused:
            yield HandOver(key=key, ahead=Count(0))

    def _of_line(self, job: sa.Row[Any], through: int) -> Iterator[Reason]:
        """Who has the head, what position is missing; if neither, what a worker has yet to do."""
        head = self._one(self.dialect.looks.head_facts, key=job.sequence_key)
        ahead = self._ahead(job)
        reason = None
        # It may have become the head itself since it was read.
        if head is not None and head.sequence_open is not None and head.id != job.id:
            reason = self._behind(job, head, ahead)
            yield reason
        missing = None if job.position is None else self._missing(job, through)
        if missing is not None:
            yield Gap(key=job.sequence_key, position=_place(job), missing=missing, ahead=ahead)
        elif reason is None:
            kind = Incoming if job.waits_for == WaitsFor.ADMISSION else HandOver
            yield kind(key=job.sequence_key, ahead=ahead)

    def _ahead(self, job: sa.Row[Any]) -> Count:
        has_positions = job.position is not None
        given = {
            "key": job.sequence_key, "place": _place(job), "has_positions": has_positions,
        }  # fmt: skip
        number = self.connection.execute(self.dialect.looks.ahead_in_line, given).scalar_one()
        return Count.up_to(MOST_COUNTED, number)

    def _behind(self, job: sa.Row[Any], head: sa.Row[Any], ahead: Count) -> Reason:
        """A replayed job may stand before the head in the order, and yet behind it; and a head may
        be from the time before its sequence had positions.
        """
        is_older = job.position is not None and head.position is None
        if is_older or _place(head) > _place(job):
            ahead += Count(1)
        state = State(head.state)
        if state.is_terminal:
            return SequenceHalted(
                key=job.sequence_key,
                head=head.id,
                head_kind=head.kind,
                head_state=state,
                why=inspection.why_halted(state, head.last_error, self._who_ended(head)),
                since=head.finished_at,
                ahead=ahead,
            )
        return BehindHead(
            key=job.sequence_key,
            head=head.id,
            head_kind=head.kind,
            head_state=state,
            since=inspection.since_of(head),
            next_at=_next_event(head),
            ahead=ahead,
            head_reasons=self._without_pause_of_sequence(head),
        )

    def _without_pause_of_sequence(self, head: sa.Row[Any]) -> tuple[Reason, ...]:
        """The job itself has said already that the sequence is paused."""
        return tuple(reason for reason in self.at(head) if reason.code != "sequence-paused")

    def _missing(self, job: sa.Row[Any], through: int) -> int | None:
        """The first position before the job's that has not arrived, as far as the look goes."""
        given = {"key": job.sequence_key, "after": through}
        expected = through + 1
        for position in self.connection.scalars(self.dialect.looks.positions_after, given):
            if position != expected:
                return expected if expected < job.position else None
            expected += 1
        return None

    # ---- workers ---------------------------------------------------------------------------------

    def _of_workers(self, job: sa.Row[Any], *, is_free: bool) -> Iterator[Reason]:
        live = [w for w in inspection.workers(self.connection, self.dialect) if w.is_alive]
        serving = [worker for worker in live if worker.slots_of(job.queue)]
        able = [worker for worker in serving if job.kind in worker.kinds]
        if not serving:
            yield NoWorker(queue=job.queue, live_workers=len(live))
        elif not able:
            names = tuple(worker.name for worker in serving)
            yield UnknownKind(queue=job.queue, kind=job.kind, workers=names)
        elif is_free:
            yield self._in_queue(job, able)

    def _in_queue(self, job: sa.Row[Any], able: list[WorkerFigures]) -> Reason:
        given = {
            "queue": job.queue, "kind": job.kind, "priority": job.priority, "job_id": job.id,
        }  # fmt: skip
        number = self.connection.execute(self.dialect.looks.ahead_in_queue, given).scalar_one()
        ahead = Count.up_to(MOST_COUNTED, number)
        in_use = {
            (row.worker, row.queue): row.number
            for row in self.connection.execute(self.dialect.looks.slots_in_use)
        }
        slots = sum(worker.slots_of(job.queue) for worker in able)
        free = any(
            in_use.get((worker.id, job.queue), 0) < worker.slots_of(job.queue) for worker in able
        )
        if free:
            return WaitingForWorker(queue=job.queue, workers=len(able), ahead=ahead)
        return Saturated(queue=job.queue, workers=len(able), slots=slots, ahead=ahead)

    # ---- it runs, or has ended -------------------------------------------------------------------

    def _running(self, job: sa.Row[Any]) -> Reason:
        found = {worker.id: worker for worker in inspection.workers(self.connection, self.dialect)}
        worker = found.get(job.worker)
        is_over = job.leased_until <= job.now
        attempt = job.attempt - job.snoozes
        if worker is not None and worker.is_alive and not is_over:
            return Running(
                worker=job.worker,
                since=job.started_at,
                until=job.leased_until,
                attempt=attempt,
                max_attempts=job.max_attempts,
                cancel_requested_at=job.cancel_requested_at,
            )
        return WorkerLost(
            worker=job.worker,
            last_seen=None if worker is None else worker.seen_at,
            until=job.leased_until,
            is_over=is_over,
            attempt=attempt,
            max_attempts=job.max_attempts,
            cancel_requested_at=job.cancel_requested_at,
        )

    def _ended(self, job: sa.Row[Any]) -> Reason:
        state, is_in_line = State(job.state), job.sequence_open is not None
        skipped_at, skipped_by = self._last_act(job, "skip")
        # A dead letter that was dealt with may have been replayed since: that skip is an older one.
        is_skipped = (
            state == State.COMPLETED and skipped_at is not None and skipped_at >= job.finished_at
        )
        return Ended(
            state=state,
            at=job.finished_at,
            why=job.last_error,
            by=skipped_by if is_skipped else self._who_ended(job),
            is_skipped=is_skipped,
            dead_letter=job.dead_letter is not None,
            halts=job.sequence_key if is_in_line else None,
            has_turn=job.admitted is not None,
            waiting=self._behind_it(job) if is_in_line else Count(0),
        )

    def _who_ended(self, job: sa.Row[Any]) -> str | None:
        """Who cancelled it: a run can also end as cancelled by itself."""
        if job.state != State.CANCELLED or job.cancel_requested_at is None:
            return None
        return self._last_act(job, "cancel")[1]

    def _behind_it(self, job: sa.Row[Any]) -> Count:
        (line,) = inspection.lines(self.connection, self.dialect, [job.sequence_key])
        return line.waiting

    # ---- reads -----------------------------------------------------------------------------------

    def _one(self, statement: Any, **given: Any) -> sa.Row[Any] | None:
        return self.connection.execute(statement, {**given, "now": self.dialect.now()}).first()

    def _last_act(self, job: sa.Row[Any], verb: str) -> tuple[datetime | None, str | None]:
        row = self._one(self.dialect.looks.last_act, job_id=job.id, event=verb)
        return (None, None) if row is None else (row.at, row.actor)


def _place(job: sa.Row[Any]) -> int:
    """Where a job stands in the order of its sequence."""
    place: int = job.id if job.position is None else job.position
    return place


def _time(job: sa.Row[Any]) -> Reason:
    """When it is due. Of a job that failed before and was put into another state since, a retry."""
    is_due, failures = job.run_at <= job.now, job.attempt - job.snoozes
    if job.waits_for == WaitsFor.TIME or failures == 0 or job.failed_at is None:
        return Delayed(at=job.run_at, is_due=is_due)
    return Retrying(
        at=job.run_at,
        is_due=is_due,
        attempt=failures + 1,
        max_attempts=job.max_attempts,
        error=job.last_error,
    )


def _next_event(head: sa.Row[Any]) -> datetime | None:
    """When something happens to a head by itself: its lease ends, or its time comes."""
    at: datetime | None = head.leased_until
    if head.state == State.PENDING and head.waits_for in (WaitsFor.TIME, WaitsFor.RETRY):
        at = head.run_at
    return at

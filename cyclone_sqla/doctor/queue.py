"""What may be wrong with the jobs: the same on every database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Connection

from cyclone_sqla import admission, inspection, operations, statements
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor.findings import Finding, Limits, error, note
from cyclone_sqla.doctor.statements import DoctorStatements
from cyclone_sqla.figures import MOST_COUNTED, WINDOW, Count, WorkerFigures

SWEEP_WINDOW = 500
"""How many sequences one statement looks at."""

MOST_SWEPT = 20
"""How many windows of sequences are looked at; workers look at all of them in their time."""

MOST_NAMED = 5
"""How many things of a kind a finding names."""


@dataclass(frozen=True)
class Queue:
    """The jobs of one schema, looked at over one connection."""

    connection: Connection
    dialect: Dialect
    limits: Limits

    def findings(self) -> Iterator[Finding]:
        """All that is wrong with them."""
        yield from self._late_steps()
        yield from self._incoming()
        yield from self._debts()
        yield from self._headless()
        yield from self._unserved()

    @cached_property
    def _sql(self) -> DoctorStatements:
        return DoctorStatements(self.dialect.tables, self.dialect.syntax)

    @cached_property
    def _before(self) -> datetime:
        """What should have been done before this time is missed."""
        return operations.present(self.connection, self.dialect) - self.limits.late

    # ---- steps that no worker has taken ----------------------------------------------------------

    def count_lapsed(self) -> int:
        """Runs whose worker had long enough to say that it is still there; a bounded number."""
        return self._count(self._sql.lapsed)

    def _count(self, late: Any) -> int:
        number: int = self.connection.execute(late, {"before": self._before}).scalar_one()
        return number

    def _late_steps(self) -> Iterator[Finding]:
        late = _minutes(self.limits)
        if lapsed := self.count_lapsed():
            yield error(
                "lapsed-leases",
                f"{_counted(lapsed)} running whose lease ran out more than {late} ago: the worker "
                "is lost, and no other has taken the job back.",
                "Start a worker on this database, whatever its queues are: each rescues the jobs "
                "of all. Or run `cyclone-sqla doctor --fix`.",
                can_be_mended=True,
            )
        if overdue := self._count(self._sql.overdue):
            yield error(
                "overdue-jobs",
                f"{_counted(overdue)} due for more than {late} and still not available.",
                "Start a worker on this database, or read the log of those that run: their stage "
                "loop does this.",
            )

    def _incoming(self) -> Iterator[Finding]:
        rows = self.connection.execute(self._sql.incoming).all()
        misplaced = [r for r in rows if r.position is None and r.released_through is not None]
        waiting = [r for r in rows if r.updated_at < self._before and r not in misplaced]
        if misplaced:
            yield error(
                "jobs-without-position",
                f"{_counted(len(misplaced))} without a position in a sequence whose jobs have "
                f"positions, so without a place in it: {_named([r.id for r in misplaced])}.",
                "Cancel them, and enqueue them again with a position.",
            )
        if waiting:
            yield error(
                "jobs-not-admitted",
                f"{_counted(len(waiting))} incoming for more than {_minutes(self.limits)}: "
                f"{_named([r.id for r in waiting])}.",
                "Start a worker on this database, or read the log of those that run: their stage "
                "loop gives places in sequences.",
            )

    # ---- sequences that nothing moves ------------------------------------------------------------

    def old_debts(self) -> list[int]:
        """Released heads whose place could be handed on, and was not."""
        payable = admission.payable_debts(self.connection, self.dialect, 0, MOST_COUNTED)
        bound = self.dialect.syntax.bind("wanted", statements.ID, [(each,) for each in payable])
        given = {**bound, "now": self.dialect.now()}
        rows = self.connection.execute(self.dialect.looks.heads, given)
        return [row.id for row in rows if row.updated_at < self._before]

    def _debts(self) -> Iterator[Finding]:
        if debts := self.old_debts():
            yield error(
                "unpaid-debts",
                f"{_counted(len(debts))} out of line for more than {_minutes(self.limits)}, and "
                f"the next of the sequence has not got its place: {_named(debts)}.",
                "Start a worker on this database, or run `cyclone-sqla doctor --fix`.",
                can_be_mended=True,
            )

    def headless(self) -> list[str]:
        """The keys of sequences that have lost their head, among the first 10,000."""
        found: list[str] = []
        after = ""
        for _ in range(MOST_SWEPT):
            window = admission.sweep(self.connection, self.dialect, after, SWEEP_WINDOW)
            found += window.headless
            if window.looked_at < SWEEP_WINDOW:
                break
            after = window.last_key
        return found

    def _headless(self) -> Iterator[Finding]:
        if keys := self.headless():
            yield error(
                "headless-sequences",
                f"{len(keys)} sequence(s) without a head, so their jobs wait for nobody: "
                f"{_named(keys)}. Were rows deleted by hand, or restored in part?",
                "A worker mends this within minutes; `cyclone-sqla doctor --fix` does it now.",
                can_be_mended=True,
            )

    # ---- jobs that no worker takes ---------------------------------------------------------------

    def _unserved(self) -> Iterator[Finding]:
        workers = inspection.workers(self.connection, self.dialect)
        live = [worker for worker in workers if worker.is_alive]
        yield from _silent(worker for worker in workers if not worker.is_alive)
        paused = set(self.connection.scalars(self.dialect.looks.paused_queues))
        groups = self.connection.execute(self.dialect.looks.available).all()
        waiting = [row for row in groups if row.queue not in paused]
        yield from _queues_without_worker(waiting, live)
        yield from _kinds_without_worker(waiting, live)


def _queues_without_worker(
    waiting: Sequence[Any], live: Sequence[WorkerFigures]
) -> Iterator[Finding]:
    for queue in sorted({row.queue for row in waiting}):
        if not any(worker.slots_of(queue) for worker in live):
            number = sum(row.number for row in waiting if row.queue == queue)
            yield error(
                "queue-without-worker",
                f"{Count.up_to(WINDOW, number)} job(s) available in queue {queue!r}, which no "
                "live worker serves.",
                "Start a worker that serves it: `cyclone-sqla work`, with the queue in --queues if "
                "that is given.",
            )


def _kinds_without_worker(
    waiting: Sequence[Any], live: Sequence[WorkerFigures]
) -> Iterator[Finding]:
    """Where a queue has workers, but none that has the action."""
    for queue, kind in sorted({(row.queue, row.kind) for row in waiting}):
        serving = [worker for worker in live if worker.slots_of(queue)]
        if serving and not any(kind in worker.kinds for worker in serving):
            yield error(
                "kind-without-worker",
                f"Jobs of kind {kind!r} are available in queue {queue!r}, and none of the live "
                "workers that serve it knows this kind.",
                "Deploy the code of the action to them, or, if it was renamed, give it its old "
                "name: kind=… of the decorator.",
            )


def _silent(workers: Iterator[WorkerFigures]) -> Iterator[Finding]:
    if names := [worker.name for worker in workers]:
        yield note(
            "silent-workers",
            f"{len(names)} worker(s) not heard of for a minute or more: {_named(names)}.",
            "Look whether their processes live; records of lost workers are removed after a day.",
        )


def _counted(number: int) -> str:
    return f"{Count.up_to(MOST_COUNTED, number)} job(s)"


def _named(things: Sequence[object]) -> str:
    names = ", ".join(str(thing) for thing in things[:MOST_NAMED])
    return names + (" …" if len(things) > MOST_NAMED else "")


def _minutes(limits: Limits) -> str:
    return f"{limits.late.total_seconds() / 60:g} min"

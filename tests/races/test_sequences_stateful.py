"""Random interleavings of several connections on sequences, against a model in plain Python.

Applications and people keep transactions open and end them well or badly, workers do their steps in
between. After every step one snapshot must satisfy the invariant; every new head must have been the
first of its line; and when the producers have stopped, nothing may be left behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.exc import DBAPIError

from cyclone_sqla import CycloneError, DatabaseBusyError, Job
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.errors import InvalidTransitionError, JobNotFoundError
from cyclone_sqla.failures import Failure
from cyclone_sqla.models import HistoryEntry, Sequence
from cyclone_sqla.outcomes import (
    CancelledOutcome,
    Completed,
    Discarded,
    GivenBack,
    Retried,
    Snoozed,
)
from tests.databases import Database
from tests.races.actors import Application, Race, Worker

BROKE = Failure.because("it broke", kind="Broken")

OUTCOMES = {
    "complete": Completed(None),
    "retry": Retried(timedelta(seconds=30), BROKE),
    "retry at once": Retried(timedelta(0), BROKE),
    "snooze": Snoozed(timedelta(seconds=30), BROKE),
    "discard": Discarded(BROKE),
    "cancel": CancelledOutcome(BROKE),
    "give back": GivenBack(),
}

KEYS = ("a", "b")
MODES = ("dead-letter", "skip", "halt")


@dataclass
class Known:
    """What the model knows of a job: when its enqueue was called, and when it was committed."""

    key: str
    called: int
    committed: int | None = None
    was_released: bool = False


class Sequences(RuleBasedStateMachine):
    """What anybody may do at any time."""

    database: ClassVar[Database]
    overlap: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.race = Race(self.database)
        with self.race.engine.begin() as connection:
            for model in (HistoryEntry, Job, Sequence):
                connection.execute(sa.delete(model))
        isolations = (None, "REPEATABLE READ") if self.overlap else (None, None)
        self.people = [self.race.application(isolation) for isolation in isolations]
        self.workers = [self.race.worker() for _ in range(2)]
        self.step = 0
        self.jobs: dict[int, Known] = {}
        self.pending: dict[Application, list[int]] = {person: [] for person in self.people}
        self.claimed: dict[Worker, list[ClaimedJob]] = {worker: [] for worker in self.workers}
        self.running: dict[int, ClaimedJob] = {}
        self.firsts: list[dict[str, list[int]]] = []
        self.heads: dict[str, int] = {}
        self.began: dict[Worker, int] = {}

    # ---- producers and people ----------------------------------------------------------------

    @initialize(counts=st.lists(st.integers(1, 4), min_size=1, max_size=2))
    def begin(self, counts: list[int]) -> None:
        for key, count in zip(KEYS, counts, strict=False):
            for _ in range(count):
                self._enqueue(self.people[0], key, None, None)
        self._end(self.people[0], well=True)

    @rule(
        who=st.integers(0, 1),
        key=st.sampled_from(KEYS),
        mode=st.sampled_from(MODES),
        delay=st.sampled_from([None, None, 30]),
        stays_open=st.booleans(),
    )
    def produce(self, who: int, key: str, mode: str, delay: int | None, stays_open: bool) -> None:
        with self._attempt(self.people[who], stays_open):
            self._enqueue(self.people[who], key, mode, delay)

    @rule(
        who=st.integers(0, 1),
        key=st.sampled_from(KEYS),
        verb=st.sampled_from(["cancel", "pause", "resume", "replay", "skip", "reschedule"]),
        place=st.sampled_from([0, 0, 1, 1, 1, 2]),
        stays_open=st.booleans(),
    )
    def meddle(self, who: int, key: str, verb: str, place: int, stays_open: bool) -> None:
        """Act on the head, the next one or the one behind: on what the verb is meant for."""
        job_id = self._aim(key, verb, place)
        options = {"process_in": 15} if verb == "reschedule" else {}
        if job_id is not None:
            with self._attempt(self.people[who], stays_open):
                self.people[who].act(verb, job_id, **options)

    @rule(
        who=st.integers(0, 1),
        key=st.sampled_from(KEYS),
        verb=st.sampled_from(["pause_sequence", "resume_sequence"]),
        stays_open=st.booleans(),
    )
    def meddle_with_the_line(self, who: int, key: str, verb: str, stays_open: bool) -> None:
        with self._attempt(self.people[who], stays_open):
            self.people[who].act(verb, key)

    @rule(who=st.integers(0, 1))
    def take_a_snapshot(self, who: int) -> None:
        if self.overlap:
            self.people[who].look()

    @rule(who=st.integers(0, 1), well=st.booleans())
    def end(self, who: int, well: bool) -> None:
        self._end(self.people[who], well)

    # ---- workers -----------------------------------------------------------------------------

    @rule(who=st.integers(0, 1), limit=st.sampled_from([1, 2, 1000]), stays_open=st.booleans())
    def admit(self, who: int, limit: int, stays_open: bool) -> None:
        with self._work(self.workers[who], stays_open):
            self.workers[who].admit(limit=limit)

    @rule(who=st.integers(0, 1), stays_open=st.booleans())
    def pay(self, who: int, stays_open: bool) -> None:
        with self._work(self.workers[who], stays_open):
            self.workers[who].pay()

    @rule(who=st.integers(0, 1), stays_open=st.booleans())
    def let_go_and_stage(self, who: int, stays_open: bool) -> None:
        with self._work(self.workers[who], stays_open):
            self.workers[who].let_go()
            self.workers[who].stage()

    @rule(who=st.integers(0, 1), count=st.integers(1, 3))
    def claim(self, who: int, count: int) -> None:
        worker = self.workers[who]
        with self._work(worker, False):
            self.claimed[worker] += worker.claim(count)

    @precondition(lambda self: self.running)
    @rule(
        who=st.integers(0, 1),
        which=st.sets(st.integers(0, 1), min_size=1),
        outcome=st.sampled_from([*OUTCOMES, "complete", "complete", "discard"]),
        stays_open=st.booleans(),
    )
    def settle(self, who: int, which: set[int], outcome: str, stays_open: bool) -> None:
        runs = sorted(self.running.values(), key=lambda job: job.id)
        jobs = [runs[i] for i in which if i < len(runs)]
        with self._work(self.workers[who], stays_open):
            if jobs:
                self.workers[who].settle(*jobs, outcome=OUTCOMES[outcome])

    @rule(who=st.integers(0, 1), stays_open=st.booleans())
    def rescue(self, who: int, stays_open: bool) -> None:
        with self._work(self.workers[who], stays_open):
            self.workers[who].rescue()

    @rule(who=st.integers(0, 1))
    def prune(self, who: int) -> None:
        with self._work(self.workers[who], False):
            self.workers[who].prune()

    @rule(who=st.integers(0, 1), well=st.booleans())
    def end_work(self, who: int, well: bool) -> None:
        self._end_work(self.workers[who], well)

    @rule(seconds=st.sampled_from([20, 40, 90]))
    def pass_time(self, seconds: int) -> None:
        self.race.clock.advance(seconds=seconds)

    # ---- what must hold ----------------------------------------------------------------------

    @invariant()
    def look(self) -> None:
        """The invariant, and what has changed since the last look."""
        self.step += 1
        self.race.check()
        rows = self.race.rows()
        there = {row.id for row in rows}
        lines: dict[str, list[int]] = {key: [] for key in KEYS}
        for row in rows:
            if row.sequence_open:
                lines[row.sequence_key].append(row.id)
            elif row.id in self.jobs:
                self.jobs[row.id].was_released = True
        for job_id, known in self.jobs.items():
            if known.committed is not None and job_id not in there:
                known.was_released = True
        self.firsts.append(lines)
        self._judge_heads(rows, lines)
        held = {row.id: row.lease for row in rows if row.state == "running"}
        self.running = {i: job for i, job in self.running.items() if held.get(i) == job.lease}

    def _judge_heads(self, rows: list[Any], lines: dict[str, list[int]]) -> None:
        """A new head was the first of its line, in some view that its admission can have had."""
        heads = {row.sequence_key: row.id for row in rows if row.admitted}
        earliest = min([self.step - 2, *self.began.values()])
        for key, head in heads.items():
            if self.heads.get(key) == head or head not in lines[key]:
                continue
            gone = {row.id for row in rows if not row.sequence_open}
            views = self.firsts[max(0, earliest) :]
            firsts = [next((i for i in view[key] if i not in gone), None) for view in views]
            assert head in firsts, f"{head} became the head of {key}: {views}"
        self.heads = heads

    def _judge_claim(self, job: ClaimedJob) -> None:
        """Whatever was committed before this job's enqueue was called has left the line."""
        known = self.jobs[job.id]
        for other_id, other in self.jobs.items():
            is_before = other.committed is not None and other.committed < known.called
            if other.key == known.key and is_before:
                assert other.was_released, f"{job.id} runs before {other_id}"

    def teardown(self) -> None:
        """Everybody ends, the producers have stopped: the lines come to their ends."""
        try:
            for index, person in enumerate(self.people):
                self._end(person, well=index == 0)
            for worker in self.workers:
                self._end_work(worker, well=True)
            self.look()
            self._bring_to_an_end()
        finally:
            self.race.close()

    def _bring_to_an_end(self) -> None:
        person, worker = self.people[0], self.workers[0]
        for key in KEYS:
            person.act("resume_sequence", key)
        person.commit()
        for _ in range(len(self.jobs) + 3):
            self.race.clock.advance(minutes=10)
            worker.rescue()
            worker.commit()
            self.race.drain(worker)
            self.look()
            for row in self.race.rows():
                if row.state == "paused":
                    person.act("resume", row.id)
                elif row.state in ("discarded", "cancelled") and row.sequence_open:
                    person.act("skip", row.id)
            person.commit()
        left = [tuple(row) for row in self.race.rows() if row.sequence_open or row.admitted]
        assert left == [], f"left behind: {left}"

    # ---- pieces ------------------------------------------------------------------------------

    def _enqueue(self, person: Application, key: str, mode: str | None, delay: int | None) -> None:
        options: dict[str, Any] = {"on_failure": mode, "max_attempts": 2}
        if delay:
            options["process_in"] = delay
        job_id = person.enqueue(key, **options)
        self.jobs[job_id] = Known(key, self.step)
        self.pending[person].append(job_id)

    def _aim(self, key: str, verb: str, place: int) -> int | None:
        rows = self.race.rows(key)
        if verb in ("replay", "skip"):
            rows = [row for row in rows if row.state in ("discarded", "cancelled")]
        elif verb == "resume":
            rows = [row for row in rows if row.state == "paused"]
        else:
            rows = [row for row in rows if row.sequence_open]
        return rows[place].id if place < len(rows) else None

    @contextlib.contextmanager
    def _attempt(self, person: Application, stays_open: bool) -> Iterator[None]:
        """A person's act: a lock that is not had, or a conflict, ends the transaction badly."""
        try:
            yield
        except (InvalidTransitionError, JobNotFoundError):
            pass
        except DatabaseBusyError:
            self._end(person, well=False)
        except (DBAPIError, CycloneError) as exc:
            if not self.race.dialect.is_passing(exc):
                raise
            self._end(person, well=False)
        if not (stays_open and self.overlap):
            self._end(person, well=True)

    def _end(self, person: Application, well: bool) -> None:
        ids, self.pending[person] = self.pending[person], []
        if well:
            try:
                person.commit()
            except DBAPIError:
                well = False
        if not well:
            person.roll_back()
        for job_id in ids:
            if well:
                self.jobs[job_id].committed = self.step
            else:
                del self.jobs[job_id]

    @contextlib.contextmanager
    def _work(self, worker: Worker, stays_open: bool) -> Iterator[None]:
        self.began.setdefault(worker, self.step - 1)
        try:
            yield
        except (DBAPIError, DatabaseBusyError) as exc:
            if not (isinstance(exc, DatabaseBusyError) or self.race.dialect.is_passing(exc)):
                raise
            self._end_work(worker, well=False)
        else:
            if not (stays_open and self.overlap):
                self._end_work(worker, well=True)

    def _end_work(self, worker: Worker, well: bool) -> None:
        claimed, self.claimed[worker] = self.claimed[worker], []
        if not well:
            worker.roll_back()
        else:
            worker.commit()
            for job in claimed:
                self._judge_claim(job)
                self.running[job.id] = job
        self.look()
        self.began.pop(worker, None)


def machine_on(database: Database) -> type[Sequences]:
    """The machine on one database: with overlapping transactions where there are any."""
    overlap = database.dialect == "postgresql"
    return type("SequencesHere", (Sequences,), {"database": database, "overlap": overlap})


def run(database: Database, examples: int, steps: int) -> None:
    """Drive the machine."""
    run_state_machine_as_test(
        machine_on(database),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)
def test_no_interleaving_strands_a_line_or_breaks_its_order(database: Database) -> None:
    run(database, examples=25, steps=40)

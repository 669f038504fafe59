"""Random interleavings of several connections on sequences, against a model in plain Python.

Applications and people keep transactions open and end them well or badly, workers do their steps in
between. After every step one snapshot must satisfy the invariant, every new head must have been the
first of its line, and every claim is judged by the rule in its plainest words. Producers stop now
and then, because each new job of a key can heal a line that was left behind: then, as at the end,
every line must have somebody to wait for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.exc import DBAPIError

from cyclone_sqla import CycloneError, DatabaseBusyError, Job
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.errors import (
    DuplicateError,
    DuplicatePositionError,
    InvalidTransitionError,
    JobNotFoundError,
    SequenceGapError,
)
from cyclone_sqla.failures import Failure
from cyclone_sqla.lifecycle import TERMINAL
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
from tests.races.lines_model import Model

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
NUMBERED = "n"
"""A key whose jobs have explicit positions."""

LINES = (*KEYS, NUMBERED)
MODES = ("dead-letter", "skip", "halt")

EXPECTED = (
    InvalidTransitionError,
    JobNotFoundError,
    DuplicateError,
    DuplicatePositionError,
    SequenceGapError,
)
"""Answers that leave the transaction as it was."""

EXAMPLES = int(os.environ.get("CYCLONE_TEST_EXAMPLES", "0"))
"""How many random sequences of steps a long run tries; 0 is the ordinary run."""


def step(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A method of the machine, and what it is called with."""
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


WHO = st.integers(0, 1)
OPEN = st.booleans()
MOSTLY_OPEN = st.sampled_from([True, True, False])
LINE = st.sampled_from(LINES)
MODE = st.sampled_from(MODES)
WHICH = st.sampled_from([{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
ENDS = st.sampled_from([*OUTCOMES, "complete", "complete", "complete", "discard", "discard"])
CHORES = st.sampled_from(["admit", "admit", "pay", "let_go", "stage", "rescue", "prune"])

STEPS = st.one_of(
    step(
        "produce",
        who=WHO,
        key=st.sampled_from(KEYS),
        mode=MODE,
        delay=st.sampled_from([None, None, None, 30]),
        stays_open=OPEN,
    ),
    step(
        "produce_one_of_its_kind",
        who=WHO,
        key=st.sampled_from(KEYS),
        unique=st.sampled_from(["u", "v"]),
        mode=MODE,
        on_duplicate=st.sampled_from(["raise", "return"]),
        stays_open=OPEN,
    ),
    step(
        "produce_at_a_position",
        who=WHO,
        mode=MODE,
        ahead=st.sampled_from([0, 0, 1, 2]),
        reject_gap=OPEN,
        stays_open=OPEN,
    ),
    step(
        "meddle",
        who=WHO,
        key=LINE,
        verb=st.sampled_from(["replay", "replay", "replay", "resume", "skip", "cancel", "pause"]),
        place=st.integers(0, 3),
        stays_open=OPEN,
    ),
    step(
        "meddle_with_the_next",
        who=WHO,
        key=LINE,
        verb=st.sampled_from(["cancel", "cancel", "pause", "reschedule"]),
        stays_open=MOSTLY_OPEN,
    ),
    step(
        "meddle_with_the_line",
        who=WHO,
        key=LINE,
        verb=st.sampled_from(["pause_sequence", "resume_sequence"]),
        stays_open=OPEN,
    ),
    step("end", who=WHO, how=st.sampled_from(["well", "well", "badly", "not yet"])),
    step("care", who=WHO, chores=st.lists(CHORES, min_size=1, max_size=3), stays_open=OPEN),
    step("sweep", who=WHO),
    step("go_on", who=WHO, count=st.integers(1, 10)),
    step("go_on", who=WHO, count=st.just(10)),
    step("settle", who=WHO, which=WHICH, outcome=ENDS, stays_open=MOSTLY_OPEN),
    step("settle", who=WHO, which=WHICH, outcome=ENDS, stays_open=OPEN),
    step("complete_and_claim", who=WHO, which=WHICH),
    step("end_work", who=WHO, well=st.sampled_from([True, True, False])),
    step("pass_time", seconds=st.sampled_from([20, 40, 90])),
    step("produce_again"),
    step("lull", comes_back=MOSTLY_OPEN),
)
"""What anybody may do at any time, as one rule: of several Hypothesis leaves some out, and these
interleavings take many of them.
"""


class Sequences(RuleBasedStateMachine):
    """What anybody may do at any time.

    What may be drawn never depends on the database: where a lock was waited for too long, the same
    steps may end otherwise the next time.
    """

    race: ClassVar[Race]

    def __init__(self) -> None:
        super().__init__()
        self.overlap = self.race.is_postgresql  # SQLite has one writer
        with self.race.engine.begin() as connection:
            for model in (HistoryEntry, Job, Sequence):
                connection.execute(sa.delete(model))
        isolations = (None, "REPEATABLE READ") if self.overlap else (None, None)
        self.people = [self.race.application(isolation) for isolation in isolations]
        self.workers = [self.race.worker() for _ in range(2)]
        self.model = Model(LINES, NUMBERED)
        self.pending: dict[Application, list[int]] = {person: [] for person in self.people}
        self.claimed: dict[Worker, list[ClaimedJob]] = {worker: [] for worker in self.workers}
        self.running: dict[int, ClaimedJob] = {}
        self.began: dict[Worker, int] = {}
        self.is_producing = True

    @rule(step=STEPS)
    def go(self, step: tuple[str, dict[str, Any]]) -> None:
        name, arguments = step
        getattr(self, name)(**arguments)

    # ---- producers and people ----------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Every line has three jobs, and its head runs."""
        for key in LINES:
            for _ in range(3):
                position = self._free_positions(1)[0] if key == NUMBERED else None
                with self._attempt(self.people[0], stays_open=True):
                    self._enqueue(self.people[0], key, position=position)
        self._end(self.people[0], well=True)
        self._settle_down(self.workers[0])
        self._claim(self.workers[0], 10)

    def produce(self, who: int, key: str, mode: str, delay: int | None, stays_open: bool) -> None:
        if not self.is_producing:
            return
        with self._attempt(self.people[who], stays_open):
            self._enqueue(self.people[who], key, on_failure=mode, process_in=delay)

    def produce_one_of_its_kind(
        self, who: int, key: str, unique: str, mode: str, on_duplicate: str, stays_open: bool
    ) -> None:
        """It goes in unless an active job holds its unique key, and that one is named."""
        person = self.people[who]
        if not self.is_producing:
            return
        with self._attempt(person, stays_open):
            options = {"unique": unique, "on_failure": mode, "on_duplicate": on_duplicate}
            try:
                ref = person.ask_for(key, max_attempts=2, **options)
            except DuplicateError as exc:
                self._judge_holder(person, unique, exc.job_id)
                return
            if not ref.created:
                self._judge_holder(person, unique, ref.id)
                return
            self.model.enqueued(ref.id, key, None)
            self.pending[person].append(ref.id)

    def _judge_holder(self, person: Application, unique: str, job_id: int) -> None:
        (holder,) = [row for row in person.rows() if row.id == job_id]
        assert (holder.unique_key, holder.state in TERMINAL) == (unique, False), holder

    def produce_at_a_position(
        self, who: int, mode: str, ahead: int, reject_gap: bool, stays_open: bool
    ) -> None:
        """At the first free position, or one or two behind it: then there is a gap, until it is
        filled by a later one.
        """
        if not self.is_producing:
            return
        position = self._free_positions(ahead + 1)[ahead]
        options = {"on_failure": mode, "reject_gap": reject_gap}
        with self._attempt(self.people[who], stays_open):
            self._enqueue(self.people[who], NUMBERED, position=position, **options)

    def meddle(self, who: int, key: str, verb: str, place: int, stays_open: bool) -> None:
        """Act on a job that the verb is meant for."""
        self._meddle(who, key, verb, place, stays_open)

    def meddle_with_the_next(self, who: int, key: str, verb: str, stays_open: bool) -> None:
        """Have the job locked whose turn comes next."""
        self._meddle(who, key, verb, 1, stays_open)

    def meddle_with_the_line(self, who: int, key: str, verb: str, stays_open: bool) -> None:
        with self._attempt(self.people[who], stays_open):
            self.people[who].act(verb, key)

    def end(self, who: int, how: str) -> None:
        """End a transaction, or begin one: with a snapshot, if it is one that keeps it."""
        if how != "not yet":
            self._end(self.people[who], how == "well")
        elif self.overlap:
            self.people[who].look()

    # ---- workers -----------------------------------------------------------------------------

    def care(self, who: int, chores: list[str], stays_open: bool) -> None:
        with self._work(self.workers[who], stays_open):
            for chore in chores:
                getattr(self.workers[who], chore)()

    def sweep(self, who: int) -> None:
        """No line is ever without its head, so there is nothing to mend."""
        with self._work(self.workers[who], False):
            assert self.workers[who].sweep() == []

    def go_on(self, who: int, count: int) -> None:
        """Places for all, then runs."""
        self._settle_down(self.workers[who])
        self._claim(self.workers[who], count)

    def settle(self, who: int, which: set[int], outcome: str, stays_open: bool) -> None:
        jobs = self._runs(which)
        with self._work(self.workers[who], stays_open):
            if jobs:
                self.workers[who].settle(*jobs, outcome=OUTCOMES[outcome])

    def complete_and_claim(self, who: int, which: set[int]) -> None:
        """What a busy worker does in one round trip."""
        worker, jobs = self.workers[who], self._runs(which)
        with self._work(worker, False):
            if jobs:
                self._take(worker, worker.complete_and_claim(jobs, 2))

    def end_work(self, who: int, well: bool) -> None:
        self._end_work(self.workers[who], well)

    def pass_time(self, seconds: int) -> None:
        self.race.clock.advance(seconds=seconds)

    # ---- what must hold ----------------------------------------------------------------------

    @invariant()
    def look(self) -> None:
        """The invariant, and what has changed since the last look."""
        rows = self.race.rows()
        self.race.check(rows)
        self.model.look(rows, self.began.values())
        held = {row.id: row.lease for row in rows if row.state == "running"}
        self.running = {i: job for i, job in self.running.items() if held.get(i) == job.lease}

    def lull(self, comes_back: bool) -> None:
        """The producers stop and everybody has ended: what can run does, and nothing waits in vain.

        They come back at once, or stay away for a while.
        """
        self._end_all()
        self._drain()
        self.model.judge_lull(self.race.rows(), self.workers[0].paused())
        self.workers[0].commit()
        self.is_producing = comes_back
        if comes_back:
            self.begin()

    def produce_again(self) -> None:
        if not self.is_producing:
            self.is_producing = True
            self.begin()

    def teardown(self) -> None:
        """The producers have stopped: the lines come to their ends."""
        try:
            self._end_all()
            self.look()
            self._bring_to_an_end()
        finally:
            self.race.dismiss()

    def _bring_to_an_end(self) -> None:
        person, worker = self.people[0], self.workers[0]
        for key in LINES:
            person.act("resume_sequence", key)
        for position in self._gaps():
            self._enqueue(person, NUMBERED, position=position)
        self._end(person, well=True)
        for _ in range(len(self.model.jobs) + 3):
            self.race.clock.advance(minutes=10)
            worker.rescue()
            worker.commit()
            self._drain()
            left = [row for row in self.race.rows() if row.sequence_open or row.admitted]
            if not left:
                return
            self._free(person, left)
        raise AssertionError(f"left behind: {[tuple(row) for row in left]}")

    def _free(self, person: Application, left: list[Any]) -> None:
        for row in left:
            if row.state == "paused":
                person.act("resume", row.id)
            elif row.state in ("discarded", "cancelled") and row.sequence_open:
                person.act("skip", row.id)
        person.commit()

    def _drain(self) -> None:
        """Run what is there to its end, as a lone worker does."""
        worker = self.workers[0]
        while True:
            self._settle_down(worker)
            claimed = self._claim(worker, 10)
            if not claimed:
                return
            with self._work(worker, False):
                worker.settle(*claimed)

    def _settle_down(self, worker: Worker) -> None:
        """What a stager does, until nothing moves: an admission may leave something to pay."""
        for step in (worker.admit, worker.pay, worker.let_go, worker.stage):
            with self._work(worker, False):
                step()

    # ---- pieces ------------------------------------------------------------------------------

    def _enqueue(self, person: Application, key: str, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        job_id = person.enqueue(key, max_attempts=2, **given)
        self.model.enqueued(job_id, key, options.get("position"))
        self.pending[person].append(job_id)

    def _free_positions(self, count: int) -> list[int]:
        taken = {known.place for known in self.model.jobs.values() if known.key == NUMBERED}
        return [n for n in range(1, len(taken) + count + 1) if n not in taken][:count]

    def _gaps(self) -> list[int]:
        """Free positions before the last one that is taken."""
        taken = [known.place for known in self.model.jobs.values() if known.key == NUMBERED]
        return [n for n in range(1, max(taken, default=0)) if n not in taken]

    def _meddle(self, who: int, key: str, verb: str, place: int, stays_open: bool) -> None:
        job_id = self._aim(key, verb, place)
        options = {"process_in": 15} if verb == "reschedule" else {}
        if job_id is not None:
            with self._attempt(self.people[who], stays_open):
                self.people[who].act(verb, job_id, **options)

    def _aim(self, key: str, verb: str, place: int) -> int | None:
        rows = self.race.rows(key)
        if verb in ("replay", "skip"):
            rows = [row for row in rows if row.state in ("discarded", "cancelled")]
        elif verb == "resume":
            rows = [row for row in rows if row.state == "paused"]
        else:
            rows = [row for row in rows if row.sequence_open]
        return rows[place % len(rows)].id if rows else None

    def _runs(self, which: set[int]) -> list[ClaimedJob]:
        runs = sorted(self.running.values(), key=lambda job: job.id)
        return [runs[i] for i in which if i < len(runs)]

    def _claim(self, worker: Worker, count: int) -> list[ClaimedJob]:
        claimed: list[ClaimedJob] = []
        with self._work(worker, False):
            claimed = worker.claim(count)
            self._take(worker, claimed)
        return claimed

    def _take(self, worker: Worker, claimed: list[ClaimedJob]) -> None:
        if claimed:
            seen, paused = worker.rows(), worker.paused()
            for job in claimed:
                self.model.judge_claim(job.id, seen, paused, self.began[worker])
            self.claimed[worker] += claimed

    @contextlib.contextmanager
    def _attempt(self, person: Application, stays_open: bool) -> Iterator[None]:
        """A person's act: a lock that is not had, or a conflict, ends the transaction badly."""
        try:
            yield
        except EXPECTED:
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
        self.model.ended(ids, well=well)

    def _end_all(self) -> None:
        for index, person in enumerate(self.people):
            self._end(person, well=index == 0)
        for worker in self.workers:
            self._end_work(worker, well=True)

    @contextlib.contextmanager
    def _work(self, worker: Worker, stays_open: bool) -> Iterator[None]:
        self.began.setdefault(worker, self.model.looks)
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
            self.running |= {job.id: job for job in claimed}
        self.look()
        self.began.pop(worker, None)


def run(
    database: Database, examples: int, steps: int, *, is_random: bool = False, shrinks: bool = True
) -> None:
    """Drive the machine on one database."""
    with contextlib.closing(Race(database)) as race:
        run_state_machine_as_test(
            type("SequencesHere", (Sequences,), {"race": race}),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                derandomize=not is_random,
                print_blob=True,
                phases=tuple(Phase) if shrinks else (Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.timeout(600 + 5 * EXAMPLES)
def test_no_interleaving_strands_a_line_or_breaks_its_order(database: Database) -> None:
    run(database, examples=EXAMPLES or 16, steps=40, is_random=EXAMPLES > 0)

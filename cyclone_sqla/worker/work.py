"""The loop that moves jobs: write what ended, claim what fits, start it, wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import NamedTuple

from cyclone_sqla import operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.hints import CALL_TO_ADMIT, CALL_TO_RENEW
from cyclone_sqla.operations import Claiming, Settled, Settlement
from cyclone_sqla.outcomes import GivenBack, Retried, Snoozed
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.holdings import Holdings
from cyclone_sqla.worker.runs import Finished
from cyclone_sqla.worker.settler import Settler
from cyclone_sqla.worker.starter import Starter
from cyclone_sqla.worker.wakeup import RUN_ENDED, Linger, Wakeup

log = logging.getLogger("cyclone_sqla.worker")

FOR_OTHERS = {CALL_TO_ADMIT, CALL_TO_RENEW}
"""Calls after which no job is available yet."""

LARGE_BATCH = 100
"""So many runs are started beside the loop. So many at least a queue may claim at once, and else no
more than half of its slots: one half runs while the other is written, claimed and started.
"""

YIELD = 0.001
"""After a large batch on SQLite the others waiting for the write lock get this many seconds."""


CHAIN = 0.05
"""For as many seconds at most, a line goes on in this worker before those that wait longer."""


END_OF_ROUND = 0.002
"""Seconds that a run which has just ended gives the loop to come to the end of its round."""


class HandOvers:
    """Says when the next of a line may be claimed together with its head's end.

    It passes those by that wait for a slot. So where some may do, its chain ends, and a turn of
    theirs comes. Where nobody waited at the latest look, the next is enough until somebody calls.
    """

    def __init__(self) -> None:
        self._is_full = True
        self._calls = 1
        self._calls_seen = self._calls_answered = 0
        self._ends = 0.0
        self._looks_again = 0.0

    def may_go_on(self) -> bool:
        """Whether nobody waits, or nobody has waited for long."""
        return not self._is_full or time.monotonic() < self._ends

    def suffice(self, slots: Mapping[str, int]) -> bool:
        """Whether a turn that hands over need not look for others."""
        self._calls_seen = self._calls
        if sum(slots.values()) == 1:
            return True
        is_answered = not self._is_full and self._calls_seen == self._calls_answered
        return is_answered and time.monotonic() < self._looks_again

    def called(self) -> None:
        """There may be new jobs. From any thread: a call during a look asks for another one."""
        self._calls += 1

    def note(self, wanted: Claiming, claimed: Mapping[str, int]) -> None:
        """So many were claimed of each queue; where one is full, somebody may wait for a slot."""
        ends = time.monotonic() + CHAIN
        if not wanted.hands_over:
            self._ends = ends
        has_looked = not (wanted.only_next and claimed)
        is_full = any(claimed.get(queue, 0) >= count for queue, count in wanted.slots.items())
        if has_looked or is_full:
            self._is_full = is_full
        if has_looked:
            self._calls_answered = self._calls_seen
            self._looks_again = ends


class _Turn(NamedTuple):
    """What a turn has come to: of so many ends some could not be written yet, being ``busy``."""

    ends: int
    busy: int
    has_looked: bool
    claimed: int
    is_partial: bool
    """Whether it filled all the slots that it may at once, and more of them are free."""

    @property
    def has_found(self) -> bool:
        """Whether there may be more to do."""
        return bool(self.claimed or (self.ends and not self.busy))


class Work:
    """One round settles the runs that have ended, claims as many jobs as there are free slots, and
    starts them.
    """

    def __init__(
        self,
        *,
        dialect: Dialect,
        held: WorkerConnection,
        executor: Executor,
        holdings: Holdings,
        settler: Settler,
        wakeup: Wakeup,
        worker: str,
        kinds: Sequence[str],
        lease: timedelta,
        poll: float,
        due_in: Callable[[float], None],
        admit_now: Callable[[], None],
        renew_now: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._executor = executor
        self._holdings = holdings
        self._settler = settler
        self._wakeup = wakeup
        self._worker = worker
        self._kinds = kinds
        self._lease = lease
        self._due_in = due_in
        self._admit_now = admit_now
        self._renew_now = renew_now
        self._linger = Linger(poll)
        self._hand_overs = HandOvers()
        self._at_once = {
            queue: max(LARGE_BATCH, -(-count // 2)) for queue, count in holdings.slots.items()
        }
        self._starter = Starter(self._start_now)
        self._finished: SimpleQueue[Finished] = executor.finished
        self._was_called = False
        self._is_uncertain = False
        self._is_claiming = True
        self._taking_turns = threading.Lock()
        self._is_asleep = False
        self._looks = 0
        self._failure: BaseException | None = None
        self.has_stopped_claiming = threading.Event()
        """After :meth:`stop_claiming`: set once the holdings know of every job ever claimed."""

    def round(self) -> None:
        """One round, with its wait if there was nothing to do."""
        with self._taking_turns:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            turn = self._take_turn()
            if turn.has_found:
                self._found_something()
            self._is_asleep = len(self._settler) <= turn.busy and not turn.is_partial
        if self._is_asleep:
            self._wait(has_looked=turn.has_looked and not turn.claimed)
            self._is_asleep = False

    def go_on(self) -> None:
        """A round in the thread of the run that was the last one, while the loop sleeps.

        Where jobs come one after the other, as those of a sequence do, neither thread has to be
        woken then. The loop is, if nothing was started here, or anything is left to do. One that is
        awake takes its turn now, or has taken it, and finds what has ended.
        """
        if not self._taking_turns.acquire(timeout=END_OF_ROUND):
            self._wakeup.set(RUN_ENDED)
            return
        try:
            is_left = self._is_asleep and not self._finished.empty()
            if is_left and not self._goes_on():
                self._wakeup.set(RUN_ENDED)
        finally:
            self._taking_turns.release()

    def _goes_on(self) -> bool:
        """Whether a run was started here, and nothing is left to do."""
        if not self._is_claiming or not self._executor.is_idle or self._failure is not None:
            return False
        try:
            turn = self._take_turn()
        except BaseException as exc:  # noqa: BLE001 - the loop raises it, logs it and recovers
            self._failure = exc
            return False
        return turn.claimed > 0 and not turn.is_partial and not len(self._settler)

    def end(self) -> None:
        """After the last round: none is taken any more."""
        with self._taking_turns:
            self._is_asleep = False
        self._starter.close()

    def _take_turn(self) -> _Turn:
        self._looks += 1
        is_claiming = self._is_claiming
        finished = self._drain()
        self._settler.add(finished)
        if any(run.written is not None and run.written.calls_for_a_look for run in finished):
            self._due_in(0.0)
        batch = self._settler.next_batch()
        if self._is_uncertain:
            self._reconcile()
        free = self._holdings.free_slots() if is_claiming else {}
        slots = {queue: min(count, self._at_once[queue]) for queue, count in free.items()}
        claimed, busy = self._step(batch, slots)
        if not is_claiming:
            self._tell_others(finished)
            self.has_stopped_claiming.set()
        self._start(claimed)
        is_partial = slots != free and len(claimed) == sum(slots.values())
        return _Turn(len(batch), busy, bool(slots), len(claimed), is_partial)

    def stop_claiming(self) -> None:
        """Claim no more; a claim that is under way still ends."""
        self._is_claiming = False
        self._wakeup.set()

    def recover(self, exc: BaseException) -> None:
        """After a failed round: a claim's reply may have been lost, or a row may be unfit for the
        database.
        """
        self._is_uncertain = True
        self._settler.doubt()
        if self._dialect.is_of_the_data(exc):
            self._settler.write_carefully(self._held, self._settler.next_batch())

    def _step(
        self, batch: Sequence[Settlement], slots: Mapping[str, int]
    ) -> tuple[list[ClaimedJob], int]:
        """Nothing is started, and nothing forgotten, before the database has committed."""
        if not batch and not self._is_worth_a_claim(slots):
            return [], 0
        settled = Settled()
        claimed: list[ClaimedJob] = []
        with self._held.step() as connection:
            if slots:
                wanted = self._wanted(slots)
                settled, claimed = self._settler.write_and_claim(connection, batch, wanted)
                self._hand_overs.note(wanted, Counter([job.queue for job in claimed]))
            else:
                settled = self._settler.write(connection, batch)
        self._holdings.take(claimed)
        busy = self._settler.note(batch, settled)
        self._tell_when_due(batch)
        if settled.has_delayed:
            self._due_in(0.0)  # by a look, which finds out when
        return claimed, busy

    def _wanted(self, slots: Mapping[str, int]) -> Claiming:
        hands_over, only_next = self._hand_overs.may_go_on(), self._hand_overs.suffice(slots)
        return Claiming(slots, self._kinds, self._worker, self._lease, hands_over, only_next)

    def _is_worth_a_claim(self, slots: Mapping[str, int]) -> bool:
        if not slots:
            return False
        with self._held.reading() as connection:
            return self._dialect.may_find_work(connection, slots, self._kinds)

    def _start(self, claimed: Sequence[ClaimedJob]) -> None:
        if len(claimed) < LARGE_BATCH:
            self._start_now(claimed)
            return
        self._starter.put(claimed)
        if self._dialect.one_writer:
            time.sleep(YIELD)

    def _start_now(self, claimed: Sequence[ClaimedJob]) -> None:
        for job in self._executor.start_runs(claimed):
            self._finished.put(Finished(job, GivenBack(), 0.0))

    def _found_something(self) -> None:
        self._was_called = False
        self._linger.reset()

    def _wait(self, *, has_looked: bool) -> None:
        """Sleep until called, or for a while."""
        if self._was_called and has_looked:
            self._due_in(0.0)  # the call that led to nothing may have been about a delayed job
        self._was_called = self._await_call()
        if self._was_called:
            self._linger.reset()

    def _await_call(self) -> bool:
        """Whether there was a call before the time of the next look.

        What is for others is passed on. They may bring work: this worker's stager calls by itself,
        but where another one's was first there is only the look. If a run's thread has looked
        meanwhile, the next look is due later.
        """
        looks, ends = self._looks, time.monotonic() + self._linger.next_wait()
        while True:
            called = self._wakeup.wait(max(0.0, ends - time.monotonic()))
            if called is not None:
                self._answer(called)
                if not called <= FOR_OTHERS:
                    return True
                self._linger.reset(to=1)
                ends = min(ends, time.monotonic() + self._linger.next_wait())
            elif looks != self._looks:
                looks, ends = self._looks, time.monotonic() + self._linger.next_wait()
            else:
                return False

    def _answer(self, called: Collection[str]) -> None:
        if called != {RUN_ENDED}:
            self._hand_overs.called()
        if CALL_TO_ADMIT in called:
            self._admit_now()
        if CALL_TO_RENEW in called:
            self._renew_now()

    def _drain(self) -> list[Finished]:
        finished: list[Finished] = []
        try:
            while True:
                finished.append(self._finished.get_nowait())
        except Empty:
            return finished

    def _reconcile(self) -> None:
        """Give back what the database says this worker holds and the worker knows nothing of."""
        with self._held.reading() as connection:
            held = operations.held_by(connection, self._dialect, self._worker)
        unknown = held - self._holdings.runs()
        if unknown:
            log.warning("giving back %d job(s) whose claim was not answered", len(unknown))
            strays = [
                Settlement(*run, 1, self._worker, GivenBack(), None) for run in sorted(unknown)
            ]
            with self._held.transaction() as connection:
                settled = operations.settle(connection, self._dialect, strays, history_limit=1)
            if settled.busy:
                return  # somebody has them locked: ask again
        self._is_uncertain = False

    def _tell_others(self, finished: Sequence[Finished]) -> None:
        """Other workers can take at once what this one, which is stopping, has put back."""
        queues = {run.job.queue for run in finished if _is_available_again(run)}
        if queues:
            with self._held.step() as connection:
                self._dialect.call_workers(connection, queues)

    def _tell_when_due(self, batch: Sequence[Settlement]) -> None:
        delays = [s.outcome.delay for s in batch if isinstance(s.outcome, Retried | Snoozed)]
        if delays:
            self._due_in(min(delays).total_seconds())


def _is_available_again(run: Finished) -> bool:
    outcome = run.outcome
    return isinstance(outcome, GivenBack) or (isinstance(outcome, Retried) and not outcome.delay)

"""Runs actions: from claimed jobs to outcomes. It knows no SQL."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import Any

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.failures import Failure
from cyclone_sqla.outcomes import GivenBack, Outcome, Snoozed
from cyclone_sqla.worker.event_loop import EventLoopThread
from cyclone_sqla.worker.run_log import log_outcome, say
from cyclone_sqla.worker.runs import (
    Finished,
    Interruption,
    Run,
    Runnable,
    Unit,
    is_awaitable,
    log_fields,
)
from cyclone_sqla.worker.threads import ActionThreads
from cyclone_sqla.worker.verdicts import End, conclude, outcome_of
from cyclone_sqla.worker.watchdog import Watchdog

UNKNOWN_KIND_DELAY = timedelta(minutes=1)
"""How long a job waits whose action is missing, though its kind was claimed."""

_Key = tuple[int, int]


class Executor:
    """Runs each job at once and reports each outcome once.

    Sync actions run in threads, async ones in one event loop; both start when first needed.
    ``actions`` finds the action of a kind. The caller counts slots: it hands in no more jobs than
    may run, and a slot is free again when its run is finished. Outcomes go to ``on_finished``,
    which is called from any thread and must be quick; without it they are put into ``finished``.
    After that ``on_ended`` is called, to wake whoever takes them; or, in the thread of a sync
    action that was the last one running, ``go_on``, which may start the next runs right there.
    ``units`` makes the transaction of a run, for a job and whether its action is async; ``at_end``
    is run in the event loop before that is closed.
    """

    def __init__(
        self,
        actions: Callable[[str], Runnable],
        *,
        max_threads: int,
        on_finished: Callable[[Finished], None] | None = None,
        on_ended: Callable[[], None] = lambda: None,
        go_on: Callable[[], None] | None = None,
        units: Callable[[ClaimedJob, bool], Unit | None] = lambda _job, _is_async: None,
        at_end: Callable[[], Coroutine[Any, Any, object]] | None = None,
    ) -> None:
        self.finished: SimpleQueue[Finished] = SimpleQueue()
        self._actions = actions
        self._units = units
        self._on_finished = on_finished or self.finished.put
        self._on_ended = on_ended
        self._go_on = go_on or on_ended
        # Dictionaries, because single operations on them are atomic: no lock per run. A run is in
        # _runs until it is finished, and in _waiting until it begins or is given back, whichever
        # takes it out first.
        self._runs: dict[_Key, Run] = {}
        self._waiting: dict[_Key, Run] = {}
        self._gate = threading.Condition()
        self._stopping = False
        self._patience_ends = float("inf")
        self._threads = ActionThreads(self._run_sync, self._after_sync, max_threads)
        self._loop = EventLoopThread(at_end)
        self._watchdog = Watchdog(self._interrupt)

    def start_runs(self, jobs: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Start a run of each job. Returns those not started: all, once the executor stops."""
        with self._gate:
            if self._stopping:
                return list(jobs)
            runs = [run for job in jobs if (run := self._hand_in(job)) is not None]
            for run in runs:
                if not run.action.is_async and not self._threads.put(run):
                    self._give_back(run)
            if in_loop := [run for run in runs if run.action.is_async]:
                self._start_in_loop(in_loop)
        return []

    def running(self) -> list[ClaimedJob]:
        """The jobs whose outcome is not known yet, those that overran their timeout included."""
        return [run.job for run in self._runs.copy().values()]

    @property
    def is_idle(self) -> bool:
        """Whether there is no run."""
        return not self._runs

    def cancel(self, job_id: int, lease: int, why: Interruption) -> bool:
        """Ask a run to stop: ``ctx.cancelled`` is set, an async action is cancelled.

        False if there is no such run. Asking again for the same reason does nothing, so clean-up
        after the first time is not disturbed.
        """
        run = self._runs.get((job_id, lease))
        if run is not None:
            self._interrupt(run, why)
        return run is not None

    def stop(self, grace: float, linger: float = 1.0) -> list[ClaimedJob]:
        """Start nothing more, wait up to ``grace`` seconds, then ask the rest to stop.

        Jobs that were handed in but not begun are given back. Those asked to stop get ``linger``
        seconds for it. Returns the jobs that run on: Python can't end a thread, and their outcomes
        are still reported if the process lives. A second call, from another thread, shortens the
        first.
        """
        with self._gate:
            self._stopping = True
        for run in self._waiting.copy().values():
            self._give_back(run)
        if not self._wait(grace):
            for run in self._runs.copy().values():
                self._interrupt(run, Interruption.STOPPING)
            self._wait_idle(monotonic() + linger)
        self._close()
        return self.running()

    # --- a run, from the hand-in to its outcome

    def _hand_in(self, job: ClaimedJob) -> Run | None:
        try:
            action = self._actions(job.kind)
            run = Run(job, action, self._units(job, action.is_async))
        except Exception as exc:  # noqa: BLE001 - a kind that can't be looked up must not be lost
            failure = Failure.of(exc)
            self._report(Finished(job, Snoozed(UNKNOWN_KIND_DELAY, failure), 0.0))
            text = "no action for job %s: %s"
            say(logging.ERROR, text, job.id, failure.error, extra=log_fields(job))
            self._on_ended()
            return None
        self._runs[run.key] = self._waiting[run.key] = run
        return run

    def _start_in_loop(self, runs: list[Run]) -> None:
        """All of a batch with one call: waking the loop is what costs."""
        try:
            self._loop.call(self._start_tasks, runs)
        except RuntimeError:  # the system gives no thread for the loop
            say(logging.ERROR, "the event loop could not be started", exc_info=True)
            for run in runs:
                self._give_back(run)

    def _run_sync(self, run: Run) -> None:
        """In a thread of its own."""
        if self._begin(run):
            while self._try_sync(run):
                pass

    def _after_sync(self) -> None:
        """In the same thread, when the run is over or goes on in the event loop."""
        if self._runs:
            self._on_ended()
        else:
            self._go_on()

    def _try_sync(self, run: Run) -> bool:
        """Whether the action has to start over."""
        try:
            context = contextvars.Context()
            value = context.run(run.call)
            if is_awaitable(value):  # a plain function around an async one
                self._loop.call(self._start_task, run, context, value)
                return False
            outcome: Outcome = run.completed(value)
        except BaseException as exc:  # noqa: BLE001 - SystemExit ends the attempt, not the thread
            return not self._end(run, outcome_of(run, exc), exc)
        return not self._end(run, outcome)

    def _start_tasks(self, runs: list[Run]) -> None:
        for run in runs:
            self._start_task(run, contextvars.Context())

    def _start_task(self, run: Run, context: contextvars.Context, value: Any = None) -> None:
        # Not by create_task, which would ask a task factory that an action may have set.
        loop = asyncio.get_running_loop()
        asyncio.Task(self._run_async(run, value), loop=loop, context=context)

    async def _run_async(self, run: Run, value: Any) -> None:
        """In the event loop. No exception may leave it: asyncio would end the loop for some.

        ``value`` is what a sync action returned, if that has to be awaited.
        """
        if value is not None or self._begin(run):
            while await self._try_async(run, value):
                value = None

    async def _try_async(self, run: Run, value: Any) -> bool:
        """Whether the action has to start over."""
        run.task = asyncio.current_task()
        try:
            if value is None:
                value = run.call()
            self._deliver_cancel(run)  # asked for before there was a task
            if is_awaitable(value):
                value = await value
            outcome: Outcome = run.completed(value)
        except BaseException as exc:  # noqa: BLE001 - as in the threads
            return not await self._end_async(run, outcome_of(run, exc), exc)
        if run.unit is None or not run.unit.is_open:
            return not self._end(run, outcome)
        return not await self._end_async(run, outcome)

    def _begin(self, run: Run) -> bool:
        """Whether the action is to be called: a stop may have given the run back."""
        if self._waiting.pop(run.key, None) is None:
            return False
        try:
            run.begin()
            if run.limit is not None:
                self._watchdog.watch(run, run.limit)
        except BaseException as exc:  # noqa: BLE001 - the system may give no thread to watch it
            self._finish(run, End(outcome_of(run, exc)))
            return False
        return True

    def _give_back(self, run: Run) -> None:
        if self._waiting.pop(run.key, None) is not None:
            self._finish(run, End(GivenBack()))

    async def _end_async(
        self, run: Run, outcome: Outcome, error: BaseException | None = None
    ) -> bool:
        run.task = None  # a commit that is cancelled midway would leave its end unknown
        if run.unit is None or not run.unit.is_open:
            return self._end(run, outcome, error)
        from sqlalchemy.util import greenlet_spawn

        return await greenlet_spawn(self._end, run, outcome, error)

    def _end(self, run: Run, outcome: Outcome, error: BaseException | None = None) -> bool:
        """Commit or roll back what the action did, and report; False if it has to start over."""
        end = conclude(run, outcome, error)
        if end is not None:
            self._finish(run, end)
        return end is not None

    def _finish(self, run: Run, end: End) -> None:
        run.task = None
        if run.limit is not None:
            self._watchdog.forget(run)
        seconds = monotonic() - run.started
        self._report(Finished(run.job, end.outcome, seconds, end.written, end.is_doubtful))
        # Only now, so that at every moment the job is among the running or the finished ones.
        self._runs.pop(run.key, None)
        if not self._threads.is_own:
            self._on_ended()
        if self._stopping:
            with self._gate:
                self._gate.notify_all()

    def _report(self, finished: Finished) -> None:
        """Hand over the outcome, then log it; a receiver that fails must not end a thread."""
        try:
            self._on_finished(finished)
        except BaseException:  # noqa: BLE001 - the thread goes on, whatever the receiver did
            say(logging.CRITICAL, "the outcome of job %s is lost", finished.job.id, exc_info=True)
        log_outcome(finished)

    def _interrupt(self, run: Run, why: Interruption) -> None:
        if run.interrupt(why) and self._loop.is_running:
            with suppress(RuntimeError):  # the loop is closed, so the run has ended
                self._loop.call(self._deliver_cancel, run)

    def _deliver_cancel(self, run: Run) -> None:
        """In the event loop, which alone says whether there is a task and what it was told."""
        if run.cancel_is_due and run.task is not None:
            run.cancel_is_due = False
            run.task.cancel(run.interruptions[-1])

    # --- the end

    def _wait(self, grace: float) -> bool:
        self._patience_ends = min(self._patience_ends, monotonic() + grace)
        with self._gate:
            self._gate.notify_all()
        return self._wait_idle(None)

    def _wait_idle(self, ends: float | None) -> bool:
        """Wait until no run is left; False if some are when patience ends."""
        with self._gate:
            while self._runs:
                left = (self._patience_ends if ends is None else ends) - monotonic()
                if left <= 0:
                    return False
                self._gate.wait(left)
        return True

    def _close(self) -> None:
        self._watchdog.close()
        self._threads.close(0.0 if self._runs else 1.0)
        if not self._runs:
            self._loop.close()

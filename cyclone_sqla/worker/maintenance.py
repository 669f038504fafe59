"""The housekeeping that every worker shares: staging, rescue, retention, and being seen."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.exc import IntegrityError

from cyclone_sqla import operations
from cyclone_sqla.backoff import BackoffPolicy
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.lifecycle import State
from cyclone_sqla.operations import LostRun, Retention
from cyclone_sqla.settings import WorkerSettings
from cyclone_sqla.worker.admitter import Admitter

log = logging.getLogger("cyclone_sqla.worker")

STAGE_BATCH = 1_000
PRUNE_BATCH = 500
FORGOTTEN_AFTER = timedelta(days=1)
"""A worker's record is dropped when it has not been heard of for this long."""


class Maintenance:
    """One thread's worth of small duties, each with its next time.

    Staging has the finest clock: it sleeps until the next job is due, at most a poll interval, and
    is woken by whoever writes an earlier due time.
    """

    def __init__(
        self,
        *,
        dialect: Dialect,
        held: WorkerConnection,
        settings: WorkerSettings,
        record: Mapping[str, Any],
        backoff_of: Callable[[str], BackoffPolicy],
        on_staged: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._settings = settings
        self._record = record
        self._on_staged = on_staged
        self._alarm = _Alarm()
        self._admitter = Admitter(dialect, held, on_staged)
        self._rescuer = Rescuer(dialect, held, settings, backoff_of, on_staged)
        self._pruner = Pruner(dialect, held, settings)
        now = time.monotonic()
        self._rescue_at = self._beat_at = now
        self._prune_at = now + random.uniform(0, settings.prune_interval)

    def due_in(self, seconds: float) -> None:
        """Something will be due in this many seconds: don't sleep longer."""
        self._alarm.set(seconds)

    def stop(self) -> None:
        """End the present sleep."""
        self._alarm.set(0)

    def round(self) -> None:
        """Everything whose time has come, then sleep."""
        pause = self.look_ahead()
        now = time.monotonic()
        if now >= self._rescue_at:
            self._rescuer.round()
            self._rescue_at = now + self._settings.rescue_interval
        if now >= self._beat_at:
            self.beat()
            self._beat_at = now + self._settings.renew_interval
        if now >= self._prune_at:
            has_more = self._pruner.round()
            self._prune_at = now if has_more else now + self._settings.prune_interval
            pause = 0.0 if has_more else pause
        self._alarm.sleep(pause)

    def look_ahead(self) -> float:
        """Stage what is due, admit what comes in, pay what is owed; seconds until the next look."""
        with self._held.reading() as connection:
            outlook = operations.look_ahead(connection, self._dialect)
        pauses = (
            self._settings.poll * random.uniform(1.0, 1.5),
            None if outlook.due_in is None else self._stage(outlook.due_in),
            self._admitter.admit() if outlook.has_incoming else None,
            self._admitter.pay() if outlook.has_debts else None,
        )
        return min(pause for pause in pauses if pause is not None)

    def _stage(self, due_in: timedelta) -> float | None:
        """Make due jobs available; seconds until the next look, None if it is not for sooner."""
        if due_in > timedelta(0):
            return due_in.total_seconds()
        with self._held.step() as connection:
            staged = operations.stage(connection, self._dialect, STAGE_BATCH)
        if staged:
            self._on_staged()
        # Due but not staged: somebody has the rows locked, so don't look again at once.
        return 0.0 if staged else None

    def recover(self) -> None:
        """Take back what a crashed predecessor held: for a worker that knows itself alone."""
        self._rescuer.recover()

    def beat(self) -> None:
        """Be seen to be alive; drop the records of the long gone."""
        worker = self._record["id"]
        with self._held.step() as connection:
            if not operations.beat(connection, self._dialect, worker):
                operations.announce(connection, self._dialect, self._record)
                operations.forget_workers(connection, self._dialect, FORGOTTEN_AFTER)


class Rescuer:
    """Takes back the jobs of lost workers."""

    def __init__(
        self,
        dialect: Dialect,
        held: WorkerConnection,
        settings: WorkerSettings,
        backoff_of: Callable[[str], BackoffPolicy],
        on_rescued: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._settings = settings
        self._backoff_of = backoff_of
        self._on_rescued = on_rescued
        self._in_touch_at: float | None = None

    def round(self) -> None:
        """One pass, unless this worker was itself out of touch.

        If it was (its host slept, the server stood still), the holders of the lapsed leases may
        have been as well, and get one renewal interval to say so.
        """
        began = time.monotonic()
        if self._was_out_of_touch(began):
            log.warning("rescue waits one renewal interval: this worker was out of touch itself")
            self._in_touch_at = (
                began + self._settings.renew_interval - self._settings.rescue_interval
            )
            return
        if self._in_touch_at is not None and began < self._in_touch_at:
            return
        self.rescue()
        self._in_touch_at = time.monotonic()

    def rescue(self) -> int:
        """One pass: the runs listed are rescued only if they are still lapsed when written."""
        settings = self._settings
        with self._held.reading() as connection:
            runs = operations.expired_runs(connection, self._dialect, settings.rescue_limit)
        if not runs:
            return 0
        with self._held.transaction() as connection:
            settled = operations.rescue(
                connection, self._dialect, runs, self._backoff, history_limit=settings.history_limit
            )
        for run in runs:
            if (state := settled.states.get(run.id)) is not None:
                log.warning(
                    "rescued job %s (%s) from worker %s after attempt %s: now %s",
                    run.id, run.kind, run.worker, run.attempt, state,
                    extra={"job_id": run.id, "kind": run.kind, "queue": run.queue},
                )  # fmt: skip
        if settled.states:
            self._on_rescued()
        return len(settled.states)

    def recover(self) -> None:
        """Everything that runs by the database's account, without waiting for leases."""
        states: Counter[State] = Counter()
        while recovered := self._recover_batch():
            states.update(recovered)
        if states:
            ends = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            log.warning("recovered jobs that a crashed worker held: now %s", ends)

    def _recover_batch(self) -> list[State]:
        with self._held.transaction() as connection:
            settled = operations.recover(
                connection,
                self._dialect,
                limit=self._settings.rescue_limit,
                history_limit=self._settings.history_limit,
            )
        return list(settled.states.values())

    def _was_out_of_touch(self, now: float) -> bool:
        if self._in_touch_at is None:
            return False
        expected = self._settings.rescue_interval + self._settings.renew_interval
        return now - self._in_touch_at > expected

    def _backoff(self, run: LostRun) -> timedelta:
        return self._backoff_of(run.kind).delay(run.crashes)


class Pruner:
    """Deletes what has ended long ago, a small batch at a time."""

    def __init__(self, dialect: Dialect, held: WorkerConnection, settings: WorkerSettings) -> None:
        self._dialect = dialect
        self._held = held
        self._settings = settings
        self._queue: list[Retention] = []
        self._after: datetime | None = None
        self._kept: list[int] = []

    def round(self) -> bool:
        """One batch; whether the pass goes on."""
        if not self._queue:
            self._queue = _retentions(self._settings)
            self._kept = []
            self._prune_keys()
        if self._queue and not self._prune_batch(self._queue[0], PRUNE_BATCH):
            self._queue.pop(0)
            self._after = None
        return bool(self._queue)

    def _prune_batch(self, retention: Retention, limit: int) -> bool:
        """Delete a batch; whether there may be more. One that a foreign key holds is halved."""
        try:
            with self._held.transaction() as connection:
                count, last = operations.prune(
                    connection,
                    self._dialect,
                    retention,
                    after=self._after,
                    kept=self._kept,
                    limit=limit,
                )
        except IntegrityError:
            if limit > 1:
                return self._prune_batch(retention, limit // 2)
            return self._step_over(retention)
        self._after = last or self._after
        return count > 0

    def _step_over(self, retention: Retention) -> bool:
        """The oldest row is kept by a row of the application's: leave it, for this pass."""
        with self._held.reading() as connection:
            job_id = operations.oldest_prunable(
                connection, self._dialect, retention, after=self._after, kept=self._kept
            )
        if job_id is None:
            return False
        log.warning("job %s can't be pruned: a row of another table refers to it", job_id)
        self._kept.append(job_id)
        return True

    def _prune_keys(self) -> None:
        age = timedelta(seconds=self._settings.idempotency_retention)
        while True:
            with self._held.step() as connection:
                count = operations.prune_idempotency_keys(
                    connection, self._dialect, age, PRUNE_BATCH
                )
            if count < PRUNE_BATCH:
                return


def _retentions(settings: WorkerSettings) -> list[Retention]:
    given = (
        (State.COMPLETED, settings.keep_completed, False),
        (State.CANCELLED, settings.keep_cancelled, False),
        (State.DISCARDED, settings.keep_discarded, False),
        (State.DISCARDED, settings.prune_dead_letters, True),
    )
    return [
        Retention(state, timedelta(seconds=age), dead_letters)
        for state, age, dead_letters in given
        if age is not None
    ]


class _Alarm:
    """A sleep that others may shorten."""

    def __init__(self) -> None:
        self._at = float("inf")
        self._changed = threading.Condition()

    def set(self, seconds: float) -> None:
        with self._changed:
            self._at = min(self._at, time.monotonic() + seconds)
            self._changed.notify()

    def sleep(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        with self._changed:
            while (left := min(give_up, self._at) - time.monotonic()) > 0:
                self._changed.wait(left)
            self._at = float("inf")

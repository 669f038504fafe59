"""The housekeeping that every worker shares: staging, rescue, retention, and being seen.

Each duty has a loop of its own, so that one that fails or takes long never delays another.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import DBAPIError, IntegrityError

from cyclone_sqla import admission, operations
from cyclone_sqla.backoff import BackoffPolicy
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.lifecycle import State
from cyclone_sqla.operations import LostRun, Place, Retention
from cyclone_sqla.settings import WorkerSettings
from cyclone_sqla.worker.admitter import Admitter
from cyclone_sqla.worker.loop import brief
from cyclone_sqla.worker.rhythm import Alarm, Contact, Rhythm

log = logging.getLogger("cyclone_sqla.worker")

STAGE_BATCH = 1_000
PRUNE_BATCH = 500

PRUNE_PAUSE = 0.02
"""Seconds between two batches of one pass: claims and settles go first."""

MOST_HELD = 100
"""Jobs that a pass tries in vain to prune, of each kind, before it leaves the rest to the next."""

FORGOTTEN_AFTER = timedelta(days=1)
"""A worker's record is dropped when it has not been heard of for this long."""


SWEEP_INTERVAL = 60.0
"""Seconds between the beginnings of two passes along the lines of all sequences."""

SWEEP_WINDOW = 500
"""Lines of one look."""

SWEEP_PAUSE = 1.0
"""Seconds between two looks of one pass: a look takes some milliseconds, and nothing depends on it.
"""


class Stager:
    """Makes jobs available when their time, or their turn in a sequence, has come.

    It sleeps until the next one is due, at most a poll interval, and is woken by whoever writes an
    earlier due time or enqueues to a sequence.
    """

    def __init__(
        self,
        dialect: Dialect,
        held: WorkerConnection,
        *,
        poll: float,
        contact: Contact,
        on_staged: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._poll = poll
        self._contact = contact
        self._on_staged = on_staged
        self._alarm = Alarm()
        self._admitter = Admitter(dialect, held, on_staged)
        self._is_called = False

    def round(self) -> None:
        """Look ahead, then sleep."""
        self._alarm.sleep(self.look_ahead())

    def due_in(self, seconds: float) -> None:
        """Something will be due in this many seconds: don't sleep longer."""
        self._alarm.set(seconds)

    def admit_now(self) -> None:
        """A job has come in for a sequence: look there first, and now."""
        self._is_called = True
        self._alarm.set(0.0)

    def look_ahead(self) -> float:
        """Stage what is due, admit what comes in, pay what is owed; seconds until the next look."""
        is_called, self._is_called = self._is_called, False
        sooner = self._admitter.admit() if is_called else None
        with self._held.reading() as connection:
            outlook = operations.look_ahead(connection, self._dialect)
        self._contact.note()
        pauses = (
            self._poll * random.uniform(0.8, 1.0),
            sooner,
            None if outlook.due_in is None else self._stage(outlook.due_in),
            self._admitter.admit() if outlook.has_incoming else None,
            self._admitter.pay() if outlook.has_debts else None,
            self._admitter.let_go() if outlook.has_held_back else None,
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


class Presence:
    """Lets the worker be seen to be alive: a report, on which nothing depends."""

    def __init__(
        self, dialect: Dialect, held: WorkerConnection, record: Mapping[str, Any], rhythm: Rhythm
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._record = record
        self._rhythm = rhythm

    def round(self) -> None:
        """Wait for the turn, then say so."""
        if self._rhythm.wait():
            self.beat()
            self._rhythm.done()

    def beat(self) -> None:
        """Write the record anew; where there is none, drop those of the long gone as well."""
        with self._held.step() as connection:
            if not operations.beat(connection, self._dialect, self._record["id"]):
                operations.announce(connection, self._dialect, self._record)
                operations.forget_workers(connection, self._dialect, FORGOTTEN_AFTER)


class Rescuer:
    """Takes back the jobs of lost workers."""

    def __init__(
        self,
        dialect: Dialect,
        held: WorkerConnection,
        settings: WorkerSettings,
        *,
        rhythm: Rhythm,
        contact: Contact,
        backoff_of: Callable[[str], BackoffPolicy],
        on_rescued: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._settings = settings
        self._rhythm = rhythm
        self._contact = contact
        self._backoff_of = backoff_of
        self._on_rescued = on_rescued
        self._has_waited = False
        self._hopeless: set[tuple[int, int]] = set()

    def round(self) -> None:
        """Wait for the turn, then one pass, unless this worker was itself out of touch.

        If it was (its host slept, the server stood still), the holders of the lapsed leases may
        have been as well, and get one renewal interval to say so.
        """
        if not self._rhythm.wait():
            return
        runs = self._lapsed()
        if self._should_wait(runs):
            log.warning("rescue waits one renewal interval: this worker was out of touch itself")
            self._rhythm.again(self._settings.renew_interval)
        elif self.rescue(runs) == self._settings.rescue_limit:
            self._rhythm.again(0.0)  # there may be more
        else:
            self._rhythm.done()

    def rescue(self, runs: Sequence[LostRun]) -> int:
        """Rescue those of the listed runs that are still lapsed; how many."""
        states = self._write(runs) if runs else {}
        if states:
            _log_rescued([run for run in runs if run.id in states], states)
            self._on_rescued()
        return len(states)

    def rescue_all(self) -> None:
        """Whatever has lapsed by now, without waiting for a turn."""
        while self.rescue(self._lapsed()) == self._settings.rescue_limit:
            pass

    def recover(self, worker: str | None = None) -> int:
        """Everything that runs by the database's account, or under the name of ``worker``, without
        waiting for leases; how many.
        """
        states: Counter[State] = Counter()
        while recovered := self._recover_batch(worker):
            states.update(recovered)
        if states:
            ends = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            log.warning("recovered jobs that a crashed worker held: now %s", ends)
        return states.total()

    def _lapsed(self) -> list[LostRun]:
        with self._held.reading() as connection:
            runs = operations.expired_runs(connection, self._dialect, self._settings.rescue_limit)
        self._contact.note()
        return runs

    def _should_wait(self, runs: Sequence[LostRun]) -> bool:
        """Once in a row at most: a worker that is always slow must not stop rescue for ever."""
        is_back = not self._contact.has_lasted(self._settings.renew_interval)
        self._has_waited = bool(runs) and is_back and not self._has_waited
        return self._has_waited

    def _write(self, runs: Sequence[LostRun]) -> dict[int, State]:
        """One bad row must not keep the others: the list is halved until it is alone."""
        try:
            with self._held.transaction() as connection:
                limit = self._settings.history_limit
                settled = operations.rescue(
                    connection, self._dialect, runs, self._backoff, history_limit=limit
                )
        except Exception as exc:
            if not self._dialect.is_of_the_data(exc):
                raise
            if len(runs) == 1:
                self._log_hopeless(runs[0], exc)
                return {}
            middle = len(runs) // 2
            return self._write(runs[:middle]) | self._write(runs[middle:])
        return settled.states

    def _log_hopeless(self, run: LostRun, exc: Exception) -> None:
        if (run.id, run.lease) not in self._hopeless:
            self._hopeless.add((run.id, run.lease))
            log.error("job %s can't be rescued: %s", run.id, brief(exc), extra=_fields(run))

    def _recover_batch(self, worker: str | None) -> list[State]:
        with self._held.transaction() as connection:
            settled = operations.recover(
                connection,
                self._dialect,
                limit=self._settings.rescue_limit,
                history_limit=self._settings.history_limit,
                worker=worker,
            )
        return list(settled.states.values())

    def _backoff(self, run: LostRun) -> timedelta:
        return self._backoff_of(run.kind).delay(run.crashes)


def _log_rescued(runs: Sequence[LostRun], states: Mapping[int, State]) -> None:
    for run in runs:
        state = states[run.id]
        log.log(
            logging.ERROR if state == State.DISCARDED else logging.WARNING,
            "rescued job %s (%s) from worker %s after attempt %s: now %s",
            run.id, run.kind, run.worker, run.attempt, state, extra=_fields(run),
        )  # fmt: skip


def _fields(run: LostRun) -> dict[str, object]:
    return {"job_id": run.id, "kind": run.kind, "queue": run.queue, "attempt": run.attempt}


class Pruner:
    """Deletes what has ended long ago: pass by pass, each in small batches."""

    def __init__(
        self, dialect: Dialect, held: WorkerConnection, settings: WorkerSettings, rhythm: Rhythm
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._settings = settings
        self._rhythm = rhythm
        self._places: dict[Retention, Place] = {}
        self._pass: Iterator[None] | None = None

    def round(self) -> None:
        """Wait for the turn, then one batch."""
        if not self._rhythm.wait():
            return
        if self.prune_batch():
            self._rhythm.again(PRUNE_PAUSE)
        else:
            self._rhythm.done()

    def prune_batch(self) -> bool:
        """One batch of the present pass, or of a new one; whether the pass goes on."""
        if self._pass is None:
            self._pass = self._batches()
        for _ in self._pass:
            return True
        self._pass = None
        return False

    def _batches(self) -> Iterator[None]:
        yield from self._keys()
        for retention in _retentions(self._settings):
            yield from self._jobs(retention)

    def _keys(self) -> Iterator[None]:
        age = timedelta(seconds=self._settings.idempotency_retention)
        while self._has_old_key(age):
            with self._held.step() as connection:
                operations.prune_idempotency_keys(connection, self._dialect, age, PRUNE_BATCH)
            yield

    def _has_old_key(self, age: timedelta) -> bool:
        with self._held.reading() as connection:
            return operations.has_old_idempotency_key(connection, self._dialect, age)

    def _jobs(self, retention: Retention) -> Iterator[None]:
        """Rows that a foreign key of the application's holds are stepped over, and reported. Those
        that it would set to NULL in a row locked by another transaction are left for a later pass.

        A pass that met too many of them ends there, and the next one goes on from that place.
        """
        place = self._places.pop(retention, None)
        limit, held, in_vain = PRUNE_BATCH, 0, list[int]()
        while oldest := self._oldest(retention, place):
            try:
                last = self._delete(retention, place, limit)
            except DBAPIError as exc:
                is_referred_to = isinstance(exc, IntegrityError)
                is_held = is_referred_to or self._dialect.is_locked_out(exc)
                if limit > 1 and (is_held or self._dialect.is_cut_off(exc)):
                    limit = limit // 2
                    continue
                if not is_held:
                    raise
                held += 1
                in_vain += [oldest.job_id] * is_referred_to
                last = oldest
            else:
                limit = min(PRUNE_BATCH, limit * 2)
            if last is None:
                break  # others have locked what is left
            place = last
            if held == MOST_HELD:
                self._places[retention] = place
                break
            yield
        _log_held(retention, in_vain)

    def _oldest(self, retention: Retention, after: Place | None) -> Place | None:
        """A plain look, so that no lock is taken where there is nothing to do."""
        with self._held.reading() as connection:
            return operations.oldest_prunable(connection, self._dialect, retention, after)

    def _delete(self, retention: Retention, after: Place | None, limit: int) -> Place | None:
        with self._held.transaction() as connection:
            self._dialect.limit_waits(connection)
            return operations.prune(connection, self._dialect, retention, after, limit)


def _log_held(retention: Retention, ids: Sequence[int]) -> None:
    if ids:
        log.warning(
            "%d %s job(s) can't be pruned, because rows of another table refer to them, such as "
            "job %d: give that foreign key ON DELETE SET NULL or CASCADE, or delete these rows",
            len(ids), retention.state, ids[0],
        )  # fmt: skip


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


class Sweeper:
    """Finds sequences that have lost their head, and gives them one: pass by pass, window by
    window.

    No step of this library leaves a line without its head. A row deleted by hand, a backup restored
    in part or a bug can; its jobs would wait for ever, and nobody would hear of it.
    """

    def __init__(
        self,
        dialect: Dialect,
        held: WorkerConnection,
        *,
        rhythm: Rhythm,
        on_mended: Callable[[], None],
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._rhythm = rhythm
        self._on_mended = on_mended
        self._after = ""

    def round(self) -> None:
        """Wait for the turn, then one window."""
        if not self._rhythm.wait():
            return
        if self.sweep():
            self._rhythm.again(SWEEP_PAUSE)
        else:
            self._rhythm.done()

    def sweep(self) -> bool:
        """One window of the present pass; whether the pass goes on."""
        with self._held.reading() as connection:
            window = admission.sweep(connection, self._dialect, self._after, SWEEP_WINDOW)
        if window.headless:
            self._mend(window.headless)
        has_more = window.looked_at == SWEEP_WINDOW
        self._after = window.last_key if has_more else ""
        return has_more

    def _mend(self, keys: Sequence[str]) -> None:
        with self._held.transaction() as connection:
            mended = admission.mend(connection, self._dialect, keys)
        for key, job_id in mended:
            log.error(
                "the sequence %r had lost its head, so its jobs waited for nobody; job %s is the "
                "head now: were rows deleted by hand, or restored in part?",
                key, job_id, extra={"sequence": key, "job_id": job_id},
            )  # fmt: skip
        if mended:
            self._on_mended()

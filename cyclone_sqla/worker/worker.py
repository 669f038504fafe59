"""A worker: the loops of one process, started and stopped together."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from cyclone_sqla import operations, schema_version
from cyclone_sqla.app import Cyclone
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.hints import CALL_TO_ADMIT, CALL_TO_RENEW
from cyclone_sqla.settings import WorkerSettings
from cyclone_sqla.urls import parsed, url_of, worker_url
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.health import ANSWERED_WITHIN, NOT_STARTED, WorkerStatus
from cyclone_sqla.worker.holdings import Holdings
from cyclone_sqla.worker.instance_lock import InstanceLock
from cyclone_sqla.worker.leases import Leases
from cyclone_sqla.worker.loop import Loop
from cyclone_sqla.worker.maintenance import (
    SWEEP_INTERVAL,
    Presence,
    Pruner,
    Rescuer,
    Stager,
    Sweeper,
)
from cyclone_sqla.worker.recycling import Share
from cyclone_sqla.worker.rhythm import Contact, Rhythm
from cyclone_sqla.worker.runs import Finished, log_fields
from cyclone_sqla.worker.sessions import Sessions, warn_of_a_small_pool
from cyclone_sqla.worker.settler import Settler
from cyclone_sqla.worker.unit_of_work import Books, UnitOfWork
from cyclone_sqla.worker.wakeup import RUN_ENDED, Source, Wakeup, source_on
from cyclone_sqla.worker.work import Work

log = logging.getLogger("cyclone_sqla.worker")

LAST_SETTLE = 5.0
"""Seconds at the end of a stop to write down what has ended, if the database answers."""

LAST_ROUND = 1.0
"""Seconds that the loops get at least for the round that they are in."""

DRAIN_LOOK = 0.05
"""Seconds between two looks whether the last runs of a spent worker have ended."""

MOST_SESSIONS = 20
"""Connections of the worker's own at most for the sessions of actions; more actions wait."""


class Worker:
    """Runs the jobs of an application until it is stopped.

    ::

        with Worker(cyclone, queues={"ledger": 5}) as worker:
            ...                                  # e.g. inside a web application's lifespan

        Worker(cyclone).run()                    # or as a process of its own

    ``settings`` are those of :class:`WorkerSettings`; single ones can be given by name.
    ``database`` (a URL or an Engine) overrides the application's. The worker makes an engine of its
    own for it, unless ``engine`` gives one: on PostgreSQL an engine of psycopg, which it uses as it
    is; on SQLite it makes one that connects as the given one does.

    Raises ConfigurationError for settings that can't work, at once, and SchemaError at start for a
    database whose tables don't fit.
    """

    def __init__(
        self,
        cyclone: Cyclone,
        settings: WorkerSettings | None = None,
        *,
        database: Engine | sa.URL | None = None,
        engine: Engine | None = None,
        **overrides: Any,
    ) -> None:
        if settings is not None and overrides:
            raise ConfigurationError("give WorkerSettings or single settings, not both")
        self.cyclone = cyclone
        self.settings = settings or WorkerSettings(**overrides)
        self._database = database
        self._given_engine = engine
        self.name = self.settings.name or f"{socket.gethostname()}:{os.getpid()}"
        self.id = f"{self.name}/{uuid.uuid4().hex[:12]}"
        # Not an Event: its set() can deadlock in a signal handler, this queue's put() can't.
        self._stop_asked: SimpleQueue[None] = SimpleQueue()
        self._share = Share(self.settings.max_jobs, self.settings.max_memory, self._end_spent)
        self._is_stopping = False
        self.is_spent = False
        """Whether :meth:`run` has ended by ``max_jobs`` or ``max_memory``, and not because somebody
        said so.
        """
        self._stopped = threading.Event()
        self._stopping = threading.Lock()
        self._parts: _Parts | None = None

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check everything that can be checked, then start the loops."""
        if self._parts is not None:
            raise ConfigurationError("this Worker was started before; make a new one")
        self.cyclone.check()
        parts = _Parts(self)
        parts.prepare()
        self._parts = parts  # from now on there is something to stop
        parts.start()

    def stop(self, grace: float | None = None) -> bool:
        """Claim nothing more, let runs end within ``grace`` seconds, give back the rest, end.

        False if a run would not end: Python can't stop a thread, and the job's lease is left to run
        out.
        """
        self.ask_to_stop()
        self._is_stopping = True
        with self._stopping:
            if self._parts is None or self._stopped.is_set():
                return True
            patience = self.settings.grace if grace is None else grace
            log.info("worker %s stops: %s", self.id, self._parts.prospect(patience))
            has_ended = self._parts.stop(patience)
            self._stopped.set()
        log.info("worker %s stopped%s", self.id, "" if has_ended else ", but not all has ended")
        return has_ended

    def run(self) -> bool:
        """Start, and work until :meth:`stop` or :meth:`ask_to_stop` is called; see :meth:`stop`.

        A KeyboardInterrupt stops the worker too, before it goes on to the caller.
        """
        try:
            self.start()
            self._stop_asked.get()
            if self.is_spent:
                self._drain()
        except BaseException:
            self.stop()
            raise
        return self.stop()

    def ask_to_stop(self) -> None:
        """Have :meth:`run` stop the worker; returns at once, safe in a signal handler."""
        self._stop_asked.put(None)

    def _end_spent(self, why: str) -> None:
        log.info("worker %s has done its share: %s", self.id, why)
        self.is_spent = self._stop_asked.empty()
        self.ask_to_stop()

    def _drain(self) -> None:
        """Nobody is in a hurry: the runs end when they end, unless somebody asks meanwhile."""
        assert self._parts is not None
        self._is_stopping = True
        self._parts.work.stop_claiming()
        while not self._parts.is_idle:
            try:
                self._stop_asked.get(timeout=DRAIN_LOOK)
            except Empty:
                continue
            self.is_spent = False
            return

    @property
    def is_healthy(self) -> bool:
        """Whether every loop runs and its latest round succeeded."""
        return self._parts is not None and all(self.health().values())

    def health(self) -> dict[str, bool]:
        """Each loop by name: whether it runs and its latest round succeeded."""
        return self._parts.health() if self._parts is not None else {}

    def status(self) -> WorkerStatus:
        """How the worker is, for health checks: it never waits for the database."""
        parts = self._parts
        return NOT_STARTED if parts is None else parts.status(is_stopping=self._is_stopping)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        import asyncio

        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.stop)

    # ---- what the parts are made from ------------------------------------------------------------

    def resolve_database(self) -> Engine | sa.URL:
        """Where the jobs are: what was given here, else the application's."""
        database = self._given_engine or self._database or self.cyclone.resolve_database()
        if database is None:
            raise ConfigurationError(
                "no database: give Cyclone(database=…), or the worker --database-url or database=…"
            )
        return database

    def note_end(self) -> None:
        """A run has ended, in any thread."""
        self._share.note_end()

    def slots(self) -> dict[str, int]:
        """How many runs of each queue may go on at the same time."""
        if self.settings.queues is not None:
            return dict(self.settings.queues)
        return dict.fromkeys(sorted(self.cyclone.registry.queues()), self.settings.concurrency)

    def make_engine(self, dialect: Dialect) -> tuple[Engine, bool]:
        """The engine to work with, and whether it is this worker's to dispose of."""
        given = self._given_engine
        if given is not None:
            engine = dialect.adopt_engine(given, self.settings)
            return engine, engine is not given
        return dialect.worker_engine(self.resolve_database(), self.settings), True


class _Parts:
    """The loops of a started worker."""

    def __init__(self, worker: Worker) -> None:
        settings, cyclone = worker.settings, worker.cyclone
        database = worker.resolve_database()
        backend = url_of(database).get_backend_name()
        self.worker = worker
        self.dialect = cyclone.dialect(backend)
        self.slots = worker.slots()
        self.kinds = sorted(cyclone.registry.kinds())
        if not self.kinds:
            raise ConfigurationError("no action is registered, so there is nothing to work on")
        self.engine, self.owns_engine = worker.make_engine(self.dialect)
        self.wakeup = Wakeup(self.slots, [CALL_TO_ADMIT, CALL_TO_RENEW, RUN_ENDED])
        self.source = self._wake_source()
        self.place: InstanceLock | None = None
        self.holdings = Holdings(self.slots)
        runs = sum(self.slots.values())
        source = cyclone.resolve_source
        self.sessions = Sessions(self.dialect, source, database, size=min(runs, MOST_SESSIONS))
        books = Books(
            self.dialect, self.sessions, cyclone.job_class, worker.id, settings.history_limit
        )
        self.executor = Executor(
            cyclone.registry.get,
            max_threads=runs,
            on_finished=self._on_finished,
            on_ended=partial(self.wakeup.set, RUN_ENDED),
            go_on=self._go_on,
            units=partial(UnitOfWork, books),
            at_end=self.sessions.dispose_async,
        )
        self.settler = Settler(self.dialect, self.holdings, worker.id, settings.history_limit)
        work_connection = self.dialect.hold(self.engine, settings, takes_turns=True)
        renewing = replace(settings, query_timeout=settings.renewal_timeout)
        lease_connection = self.dialect.hold(self.engine, renewing)
        stage_connection = self.dialect.hold(self.engine, settings)
        care_connection = self.dialect.hold(self.engine, settings)
        self.connections = [work_connection, lease_connection, stage_connection, care_connection]
        self._ending = threading.Event()
        self.contact = contact = Contact(settings.renew_interval + settings.poll)
        self.care_connection = care_connection
        self.revision: str | None = None
        self.stager = Stager(
            self.dialect,
            stage_connection,
            poll=settings.poll,
            contact=contact,
            on_staged=self.wakeup.set,
        )
        self.rescuer = Rescuer(
            self.dialect,
            care_connection,
            settings,
            rhythm=Rhythm(settings.rescue_interval, self._ending),
            contact=contact,
            backoff_of=cyclone.registry.backoff_of,
            on_rescued=self.wakeup.set,
        )
        self.pruner = Pruner(
            self.dialect, care_connection, settings, self._rhythm(settings.prune_interval)
        )
        self.sweeper = Sweeper(
            self.dialect,
            care_connection,
            rhythm=self._rhythm(SWEEP_INTERVAL),
            on_mended=self.wakeup.set,
        )
        self.presence = Presence(
            self.dialect, care_connection, self._record(), self._rhythm(settings.report_interval)
        )
        self.leases = Leases(
            dialect=self.dialect,
            held=lease_connection,
            executor=self.executor,
            holdings=self.holdings,
            lease=settings.lease_length,
            rhythm=Rhythm(settings.renew_interval, self._ending, first=settings.renew_interval),
        )
        self.work = Work(
            dialect=self.dialect,
            held=work_connection,
            executor=self.executor,
            holdings=self.holdings,
            settler=self.settler,
            wakeup=self.wakeup,
            worker=worker.id,
            kinds=self.kinds,
            lease=settings.lease_length,
            poll=settings.poll,
            due_in=self.stager.due_in,
            admit_now=self.stager.admit_now,
            renew_now=self.leases.renew,
        )
        self.loops = self._make_loops(settings.renew_interval / 2)

    def _make_loops(self, longest_pause_of_leases: float) -> list[Loop]:
        """In the order in which they end."""
        passing = self.dialect.is_passing
        return [
            Loop(
                "work",
                self.work.round,
                recover=self.work.recover,
                is_passing=passing,
                at_end=self.work.end,
            ),
            Loop("stage", self.stager.round, is_passing=passing),
            Loop("rescue", self.rescuer.round, is_passing=passing),
            Loop("prune", self.pruner.round, is_passing=passing),
            Loop("sweep", self.sweeper.round, is_passing=passing),
            Loop("presence", self._report, is_passing=passing),
            Loop(
                "leases",
                self.leases.round,
                is_passing=passing,
                longest_pause=longest_pause_of_leases,
            ),
        ]

    def _rhythm(self, interval: float) -> Rhythm:
        """Of a duty that all workers have: they don't all do it at the same time."""
        return Rhythm(interval, self._ending, first=interval * random.uniform(0.5, 1.0))

    def summary(self) -> str:
        queues = ", ".join(f"{name}:{count}" for name, count in self.slots.items())
        return f"queues {queues}; kinds {', '.join(self.kinds)}"

    def prospect(self, grace: float) -> str:
        """What a stop waits for."""
        count = len(self.executor.running())
        return f"{count} job(s) running, which get up to {grace:g} s" if count else "nothing runs"

    def health(self) -> dict[str, bool]:
        return {loop.name: loop.healthy for loop in self.loops}

    @property
    def is_idle(self) -> bool:
        """After the end of claiming: whether every run has ended and is written down."""
        return self.work.has_stopped_claiming.is_set() and not self.holdings.runs()

    def status(self, *, is_stopping: bool) -> WorkerStatus:
        return WorkerStatus(
            is_live=is_stopping or all(loop.is_alive for loop in self.loops),
            is_stopping=is_stopping,
            loops=self.health(),
            is_reachable=self._is_reachable(),
            hears=None if self.source is None else self.source.healthy,
            revision=self.revision,
        )

    def _is_reachable(self) -> bool:
        """Of the connections those that have quick answers count, and nobody waits for theirs."""
        quick = self.connections[:3]
        return self.contact.is_fresh(max(ANSWERED_WITHIN, 3 * self.worker.settings.poll)) and all(
            connection.waiting <= ANSWERED_WITHIN for connection in quick
        )

    def _report(self) -> None:
        """A sign of life, and a look at the tables: somebody may have migrated them."""
        self.presence.round()
        if not self._ending.is_set():
            with self.care_connection.reading() as connection:
                self._note_revision(connection)

    def _note_revision(self, connection: sa.Connection) -> None:
        self.revision = schema_version.read(connection, self.worker.cyclone.schema)

    def prepare(self) -> None:
        """All that can be refused; nothing is left of a refused worker."""
        try:
            with self.connections[0].reading() as connection:
                schema_version.require(connection, self.worker.cyclone.schema)
                self._note_revision(connection)
                self.dialect.refuse_unfit_for_work(connection)
                file = self.dialect.file_of(connection)
            self._take_place(file)
            self._announce()
        except BaseException:
            self._close()
            if self.place is not None:
                self.place.release()
            raise

    def _announce(self) -> None:
        """A database that is busy just now is no reason not to start: the loop says it again."""
        try:
            self.presence.beat()
        except Exception as exc:
            if not (self.dialect.is_passing(exc) or self.dialect.is_conflict(exc)):
                raise

    def start(self) -> None:
        log.info("worker %s started: %s", self.worker.id, self.summary())
        if any(a.takes_context and not a.is_async for a in self.worker.cyclone.registry):
            warn_of_a_small_pool(self.sessions, sum(self.slots.values()))
        if self.source is not None:
            self.source.start()
        for loop in self.loops:
            loop.start()

    def stop(self, grace: float) -> bool:
        """Runs end while their leases are still renewed; then what ended is written, then all is
        closed.
        """
        self.work.stop_claiming()
        left = self.executor.stop(grace)
        give_up = time.monotonic() + LAST_SETTLE
        self._settle_the_rest(give_up, {job.id for job in left})
        has_ended = self._end_loops(give_up)
        for job in left:
            log.warning(
                "job %s (%s) runs on in its thread; its lease will run out",
                job.id, job.kind, extra=log_fields(job),
            )  # fmt: skip
        if has_ended and self._leave() and self.place is not None and not left:
            self.place.release()
        return has_ended and not left

    def _take_place(self, file: Path | None) -> None:
        """Keep out whoever can't work beside this worker, and recover if it is alone."""
        alone = self.worker.settings.single_instance
        if file is not None:
            self.place = InstanceLock(file, alone=alone)
            self.place.acquire()
        elif alone:
            raise ConfigurationError(
                "single_instance is for a SQLite file: a server's workers can be on many hosts, so "
                "leave it out; the jobs of a crashed worker run again when their leases run out"
            )
        if alone:
            self.rescuer.recover()

    def _settle_the_rest(self, give_up: float, left: AbstractSet[int]) -> None:
        """Wait until every end is written that can still come, those of a last claim included."""
        while time.monotonic() < give_up and self.loops[0].is_alive:
            if (
                self.work.has_stopped_claiming.is_set()
                and {run.job_id for run in self.holdings.runs()} <= left
            ):
                return
            self.wakeup.set()
            time.sleep(0.01)

    def _end_loops(self, give_up: float) -> bool:
        """Whether all have ended by themselves: one that waits for a silent database does not."""
        for loop in self.loops:
            loop.stop()
        self.wakeup.set()
        self.stager.due_in(0.0)
        self._ending.set()
        if self.source is not None:
            self.source.stop()
        if self._have_ended(max(give_up, time.monotonic() + LAST_ROUND)):
            return True
        self._cut_off()
        if self._have_ended(time.monotonic() + LAST_ROUND):
            self._close()
        return False

    def _have_ended(self, give_up: float) -> bool:
        return all(loop.join(max(0.0, give_up - time.monotonic())) for loop in self.loops)

    def _cut_off(self) -> None:
        for connection in self.connections:
            connection.cut()

    def _leave(self) -> bool:
        """Whether all is closed. In a thread, because a silent database may never answer."""
        leaving = threading.Thread(target=self._withdraw, name="cyclone-leave", daemon=True)
        leaving.start()
        leaving.join(LAST_SETTLE)
        if leaving.is_alive():
            self._cut_off()
            leaving.join(LAST_ROUND)
        if leaving.is_alive():
            return False
        self._close()
        return True

    def _withdraw(self) -> None:
        try:
            with self.connections[0].step() as connection:
                operations.withdraw(connection, self.dialect, self.worker.id)
        except Exception as exc:  # noqa: BLE001 - a record left behind is forgotten in a day
            log.warning("the worker's record could not be removed: %s", type(exc).__name__)

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.sessions.dispose()
        if self.owns_engine:
            self.engine.dispose()

    def _wake_source(self) -> Source | None:
        settings, direct = self.worker.settings, self.engine
        if not settings.listen:
            return None
        if self.dialect.notifies and settings.listen_url is not None:
            direct = sa.create_engine(worker_url(parsed(settings.listen_url)), poolclass=NullPool)
        return source_on(direct, self.dialect, self.wakeup)

    def _on_finished(self, finished: Finished) -> None:
        self.executor.finished.put(finished)
        self.worker.note_end()

    def _go_on(self) -> None:
        self.work.go_on()

    def _record(self) -> Mapping[str, Any]:
        return {
            "id": self.worker.id,
            "name": self.worker.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "queues": self.slots,
            "kinds": self.kinds,
        }

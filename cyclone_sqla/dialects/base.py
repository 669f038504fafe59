"""What databases do differently, at the level of an operation; this is what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.orm import Session

from cyclone_sqla.clock import Clock
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.hint_senders import notify_channel
from cyclone_sqla.hints import HintSender, queue_after_commit
from cyclone_sqla.inspection_statements import InspectionStatements
from cyclone_sqla.intervention_statements import InterventionStatements
from cyclone_sqla.job_spec import JobRef, JobSpec
from cyclone_sqla.lifecycle import State
from cyclone_sqla.line_statements import LineStatements
from cyclone_sqla.models import Tables, tables_in
from cyclone_sqla.settings import DEFAULT_SETTINGS, WorkerSettings
from cyclone_sqla.statements import Statements, Syntax
from cyclone_sqla.urls import url_of, worker_url

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

AUTOCOMMIT = (
    "This connection is in AUTOCOMMIT: the job would be committed, and could run, before your own "
    "writes are. Enqueue in a transaction (an engine or connection without "
    'isolation_level="AUTOCOMMIT").'
)

Rows: TypeAlias = Sequence[Any]
"""What a statement returned; the columns of a row are its attributes."""

HintMode: TypeAlias = Literal[True, False, "transaction"]
"""When workers are told of new jobs: after the commit, never, or (PostgreSQL) by the commit itself.
"""


class Step(NamedTuple):
    """A statement of several that commit together, and none of which needs another's rows."""

    statement: Any
    params: Mapping[str, Any]


class Ended(NamedTuple):
    """The runs that a worker's turn settles: each simply returned. ``released`` are the ids of
    those that leave a sequence.
    """

    ids: Sequence[int] = ()
    leases: Sequence[int] = ()
    results: Sequence[str | None] = ()
    released: Sequence[int] = ()


class Turn(NamedTuple):
    """What a worker's turn did: the ids of the jobs that it settled, whether the head of a sequence
    waits for its time now, and the jobs that it claimed. The first ``handed`` of these are the next
    in line of those that it settled.
    """

    settled: Sequence[int]
    has_delayed: bool
    claimed: Sequence[ClaimedJob]
    handed: int = 0


class Dialect(ABC):
    """One database's way of doing what is not the same everywhere, for one schema."""

    name: str
    syntax: Syntax
    notifies = False
    """Whether the database itself calls other processes, by NOTIFY."""
    embedded = False
    """Whether it is a file of this host, which a worker sets up by itself."""
    one_writer = False
    """Whether a write transaction keeps every other one out; sessions of actions then have an
    engine of the worker's own, which begins as that needs.
    """

    ids: Iterator[int] | None = None
    """Where a test has new jobs get their ids from, instead of the database."""

    def __init__(self, schema: str | None, clock: Clock) -> None:
        self.schema = schema
        self.clock = clock
        self.tables: Tables = tables_in(schema)
        self.sql = Statements(self.tables, self.syntax)
        self.lines = LineStatements(self.tables, self.syntax)
        self.acts = InterventionStatements(self.tables, self.syntax)
        self.looks = InspectionStatements(self.tables, self.syntax)
        self._prunes: dict[tuple[State, bool, bool], Any] = {}

    # ---- in the caller's transaction -------------------------------------------------------------

    @abstractmethod
    def now(self) -> datetime | None:
        """The value of every statement's ``:now``: None where the database's own clock is meant."""

    @abstractmethod
    def refuse_unfit(self, connection: Connection) -> None:
        """Raise TransactionError if an enqueue here would not commit with its caller."""

    @abstractmethod
    def has_tables(self, connection: Connection) -> bool:
        """Whether the queue's tables are there; never spoils the caller's transaction."""

    @abstractmethod
    def enqueueing(self, connection: Connection) -> AbstractContextManager[None]:
        """Turns the database's lock errors during an enqueue into this library's."""

    @abstractmethod
    def conflict_guard(
        self, connection: Connection, *, many: bool
    ) -> AbstractContextManager[object]:
        """Keeps the caller's transaction usable where a unique key's conflict is an error; of an
        enqueue of many jobs an exception leaves nothing.
        """

    @abstractmethod
    def savepoint(self, connection: Connection) -> AbstractContextManager[object]:
        """Around a statement whose conflict with a unique key would end the transaction."""

    def next_ids(self, connection: Connection, count: int) -> list[int]:
        """The ids of new jobs, rising."""
        drawn = self.draw_ids(connection, count)  # also locks where ids are drawn under a lock
        return drawn if self.ids is None else sorted(islice(self.ids, count))

    @abstractmethod
    def draw_ids(self, connection: Connection, count: int) -> list[int]:
        """The database's next job ids, rising."""

    def copy_plain(
        self, connection: Connection, specs: Sequence[JobSpec], origin: str | None
    ) -> list[JobRef] | None:
        """Insert jobs of which nothing is asked but to run, as the database takes them fastest.
        None if it has no such way, or not in this transaction.

        What it refuses midway leaves nothing, and the caller's transaction usable.
        """
        return None

    @abstractmethod
    def lock_sequence(self, connection: Connection, key: str) -> None:
        """Keep other transactions that ask for this lock out until this one ends."""

    @abstractmethod
    def hint_sender(self, engine: Engine, url: sa.URL | None) -> HintSender:
        """The way to the workers on the database of an application's engine."""

    def tell_workers(
        self,
        connection: Connection,
        session: Session | None,
        queues: Collection[str],
        *,
        mode: HintMode,
        url: sa.URL | None,
    ) -> None:
        """Have workers told of new jobs in these queues when the caller's transaction has
        committed.
        """
        if mode is not False:
            sender = self.hint_sender(connection.engine, url)
            channel = notify_channel(self.schema)
            queue_after_commit(connection, channel, queues, sender, session=session)

    # ---- statements ------------------------------------------------------------------------------

    def prune_statement(self, state: State, dead_letters: bool, *, only_look: bool = False) -> Any:
        """The statement that prunes, or looks for, ended jobs: built at its first use."""
        key = (state, dead_letters, only_look)
        if key not in self._prunes:
            build = self.sql.oldest_prunable if only_look else self.sql.prune
            self._prunes[key] = build(state, dead_letters=dead_letters)
        return self._prunes[key]

    # ---- in a worker's own transactions ----------------------------------------------------------

    @abstractmethod
    def worker_engine(
        self, database: Engine | sa.URL, settings: WorkerSettings = DEFAULT_SETTINGS
    ) -> Engine:
        """An engine of the worker's own for the application's database."""

    @abstractmethod
    def adopt_engine(self, engine: Engine, settings: WorkerSettings) -> Engine:
        """The engine to work with where the user gives one: that, or one that connects like it.

        Raises ConfigurationError for one that a worker's statements can't run on.
        """

    @abstractmethod
    def session_engine(self, database: Engine | sa.URL, size: int) -> Engine:
        """An engine of the worker's own for the sessions of sync actions, ``size`` at a time."""

    @abstractmethod
    def async_session_engine(self, database: Engine | sa.URL, size: int) -> AsyncEngine:
        """The same for async actions; ConfigurationError where SQLAlchemy's asyncio part or the
        driver is not installed.
        """

    @abstractmethod
    def command_engine(self, database: Engine | sa.URL) -> Engine:
        """An engine for a person's command, whose transactions are like an application's."""

    @abstractmethod
    def refuse_unfit_for_work(self, connection: Connection) -> None:
        """Raise ConfigurationError if a worker can't keep its promises on this database."""

    def file_of(self, connection: Connection) -> Path | None:
        """The file that the database is; None where it is a server's."""
        return None

    @abstractmethod
    def hold(
        self, engine: Engine, settings: WorkerSettings, *, takes_turns: bool = False
    ) -> WorkerConnection:
        """A connection that a loop keeps for its life; ``takes_turns`` if for :meth:`take_turn`."""

    def may_find_work(
        self, connection: Connection, queues: Collection[str], kinds: Collection[str]
    ) -> bool:
        """Whether a claim is worth its transaction: asked where one keeps all others out."""
        return True

    @abstractmethod
    def claim(
        self, connection: Connection, slots: Mapping[str, int], params: Mapping[str, Any]
    ) -> Sequence[ClaimedJob]:
        """Claim up to ``slots[queue]`` available jobs of each queue."""

    @abstractmethod
    def claim_this(self, connection: Connection, params: Mapping[str, Any]) -> list[ClaimedJob]:
        """Claim the job ``job_id`` if it is available."""

    def run(self, connection: Connection, steps: Sequence[Step]) -> list[Rows]:
        """Run steps in their order in one transaction, and in one round trip where the driver can;
        the rows of each.
        """
        with self.together(connection):
            return [_rows_of(connection.execute(*step)) for step in steps]

    def run_and_claim(
        self,
        connection: Connection,
        steps: Sequence[Step],
        slots: Mapping[str, int],
        params: Mapping[str, Any],
    ) -> tuple[list[Rows], Sequence[ClaimedJob]]:
        """:meth:`run`, then :meth:`claim`."""
        return self.run(connection, steps), self.claim(connection, slots, params)

    def take_turn(
        self,
        connection: Connection,
        ended: Ended,
        slots: Mapping[str, int],
        params: Mapping[str, Any],
        *,
        hands_over: bool,
        only_next: bool,
    ) -> Turn | None:
        """Settle runs that returned, hand on, and claim, by one call; None where it can't be had.

        One that ``hands_over`` gives the next in line of each head to this worker without asking
        who else waits; if there was any, it claims no other with ``only_next``.
        """
        return None

    def call_workers(  # noqa: B027 - some have nobody to tell
        self, connection: Connection, queues: Collection[str]
    ) -> None:
        """Tell other workers of jobs in these queues, where the database is what tells them."""

    @abstractmethod
    def together(self, connection: Connection) -> AbstractContextManager[None]:
        """A worker's statements that commit together, inside a step or a transaction."""

    def limit_waits(self, connection: Connection) -> None:  # noqa: B027 - one writer waits for none
        """Until the transaction ends, wait for no other's row for long."""

    def is_locked_out(self, error: BaseException) -> bool:
        """Whether another transaction held a row for longer than :meth:`limit_waits` allows."""
        return False

    def is_cut_off(self, error: BaseException) -> bool:
        """Whether the server ended a statement that took longer than it allows."""
        return False

    @abstractmethod
    def sees_commits(self, connection: Connection) -> bool:
        """Whether a statement of the open transaction sees what others have committed by then."""

    @abstractmethod
    def is_passing(self, error: BaseException) -> bool:
        """Whether a worker's own transaction that met this error is simply run again."""

    @abstractmethod
    def is_conflict(self, error: BaseException) -> bool:
        """Whether a transaction was the victim of another one, and may well pass when run again."""

    def is_of_the_data(self, error: BaseException) -> bool:
        """Whether the values or a row were refused, so that the rest of a batch may well pass."""
        if isinstance(error, DBAPIError):
            return isinstance(error, DataError | IntegrityError)
        return isinstance(error, StatementError | UnicodeError | OverflowError)


class WorkerConnection(ABC):
    """A connection that a worker's loop keeps: remade after an error, closed with the loop."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Connection]:
        """For reads: takes no lock that others could wait for."""

    @abstractmethod
    def step(self) -> AbstractContextManager[Connection]:
        """For statements of a worker's cycle: each a transaction by itself on a server, all one on
        SQLite.
        """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Connection]:
        """For several statements that commit together."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""

    @property
    def waiting(self) -> float:
        """Seconds that the present step takes already, where its database may fall silent."""
        return 0.0

    def cut(self) -> None:  # noqa: B027 - a file always answers
        """Have the present step fail, from another thread."""


def connecting_like(engine: Engine) -> Callable[[], Any]:
    """Connect as this engine does, its ``connect_args`` and listeners included.

    A twin of its pool connects, and the connection is taken out of the twin at once.
    """
    twin = engine.pool.recreate()

    def connect() -> Any:
        fairy = twin.connect()
        connection = fairy.dbapi_connection
        fairy.detach()
        return connection

    return connect


def session_pool(size: int) -> dict[str, Any]:
    """The bounds of a pool of ours: an action waits for a connection until its timeout ends it."""
    return {"pool_size": size, "max_overflow": 0, "pool_timeout": 3600.0}


def async_engine_like(database: Engine | sa.URL, drivername: str, size: int) -> AsyncEngine:
    """An asynchronous engine with a pool of its own: the loop of actions is not the application's.

    Of an asynchronous engine its pool's twin connects; else ``drivername`` is connected to its URL.
    """
    try:
        from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

        if isinstance(database, Engine) and database.dialect.is_async:
            twin = Engine(database.pool.recreate(), database.dialect, database.url)
            return AsyncEngine(twin)
        url = worker_url(url_of(database)).set(drivername=drivername)
        return create_async_engine(url, **session_pool(size))
    except ImportError as exc:
        raise ConfigurationError(
            "ctx.async_session needs SQLAlchemy's asyncio part and an asynchronous driver: "
            "install cyclone-sqla[async]"
        ) from exc


def claimed_jobs(rows: Iterable[Any]) -> list[ClaimedJob]:
    """The rows of a claim as the jobs that they are."""
    return list(map(ClaimedJob._make, rows))


def _rows_of(result: sa.CursorResult[Any]) -> Rows:
    return result.all() if result.returns_rows else ()

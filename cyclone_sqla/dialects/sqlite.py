"""SQLite: one file in WAL mode, one writer, everything on one host.

A write transaction owns the file, so there are no row locks to step over and ids are in commit
order. The price is that every step queues for one lock: a worker spends transactions, not
statements.
"""

from __future__ import annotations

import json
import logging
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Text, bindparam, event, func, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects.base import (
    AUTOCOMMIT,
    Dialect,
    WorkerConnection,
    async_engine_like,
    claimed_jobs,
    connecting_like,
    session_pool,
)
from cyclone_sqla.errors import (
    ConfigurationError,
    DatabaseBusyError,
    SnapshotError,
    TransactionError,
)
from cyclone_sqla.hint_senders import local_sender
from cyclone_sqla.hints import HintSender
from cyclone_sqla.models import (
    EPOCH,
    IS_AVAILABLE,
    LEASE_COUNTER,
    MICROSECOND,
    Duration,
    Timestamp,
)
from cyclone_sqla.settings import DEFAULT_SETTINGS, WorkerSettings
from cyclone_sqla.statements import Columns, NewJob, predicate
from cyclone_sqla.urls import url_of, worker_url

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

log = logging.getLogger("cyclone_sqla.sqlite")

OLDEST_VERSION = (3, 35, 0)
"""RETURNING came with 3.35, UPDATE … FROM with 3.33."""

_BROKEN = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CORRUPT")
"""After these SQLite has rolled back by itself, which SQLAlchemy does not notice."""

_safe_savepoints: weakref.WeakSet[sa.Dialect] = weakref.WeakSet()
_beginning_as_asked: weakref.WeakSet[sa.Dialect] = weakref.WeakSet()


def begin_before_savepoints(engine: Engine | AsyncEngine) -> None:
    """Make SAVEPOINT safe on an application's SQLite engine: call it once after
    ``create_engine()``.

    Python's sqlite3 begins a transaction at the first write, not at a SAVEPOINT. A savepoint that
    comes first *is* the transaction, and releasing it commits. With this, a BEGIN is sent before
    it. The engine of another database is left alone.
    """
    if engine.dialect.name == "sqlite" and engine.dialect not in _safe_savepoints:
        event.listen(getattr(engine, "sync_engine", engine), "savepoint", _begin)
        _safe_savepoints.add(engine.dialect)


def _begin(connection: Connection, _name: str) -> None:
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")


class SqliteSyntax:
    """SQLite's own words."""

    code_points = "BINARY"

    def now(self) -> sa.ColumnElement[Any]:
        return bindparam("now", type_=Timestamp())

    def rows(self, name: str, columns: Columns) -> sa.FromClause:
        """Rows travel as one JSON parameter."""
        given = func.json_each(bindparam(name, type_=Text())).table_valued(
            "value", name=f"{name}_json"
        )
        fields = [
            sa.type_coerce(func.json_extract(given.c.value, sa.literal_column(f"'$[{i}]'")), type_)
            for i, type_ in enumerate(columns.values())
        ]
        labelled = [field.label(column) for field, column in zip(fields, columns, strict=True)]
        return select(*labelled).select_from(given).subquery(name)

    def bind(self, name: str, columns: Columns, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        encoders = [_ENCODERS.get(type(type_)) for type_ in columns.values()]
        if not any(encoders):
            return {name: json.dumps(rows)}
        plain = [
            [
                encode(value) if encode is not None and value is not None else value
                for encode, value in zip(encoders, row, strict=True)
            ]
            for row in rows
        ]
        return {name: json.dumps(plain)}

    def jobs(self, name: str, columns: Columns) -> sa.FromClause:
        return self.rows(name, columns)

    def bind_jobs(self, name: str, columns: Columns, jobs: Iterable[NewJob]) -> dict[str, Any]:
        rows = [{**job.rest, "id": job.id, "arguments": job.arguments} for job in jobs]
        return self.bind(name, columns, [[row[column] for column in columns] for row in rows])

    def ids_by_state(self, insert: Any) -> Any:
        return insert

    def states_of(self, rows: Sequence[Any]) -> dict[int, str]:
        return dict(rows)

    def one_of(self, column: sa.ColumnElement[Any], ids: sa.Select[Any]) -> sa.ColumnElement[bool]:
        return column.in_(ids)

    def json(self, text: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return text

    def locked(
        self, picked: sa.Select[Any], job: sa.FromClause, name: str, *, to_delete: bool = False
    ) -> sa.FromClause:
        return picked.cte(name)

    def insert_unless_held(self, table: sa.Table, source: sa.Select[Any]) -> Any:
        """``WHERE true`` is what lets ON CONFLICT follow a SELECT: else it is read as a join."""
        source = source.where(sa.literal_column("true"))
        insert = sqlite_insert(table).from_select(list(source.selected_columns.keys()), source)
        return insert.on_conflict_do_nothing()

    def upsert(self, table: sa.Table, key: dict[str, Any], values: dict[str, Any]) -> Any:
        insert = sqlite_insert(table).values(**key, **values)
        return insert.on_conflict_do_update(index_elements=list(key), set_=values)


_ENCODERS: dict[type, Callable[[Any], int]] = {
    Timestamp: lambda time: (time - EPOCH) // MICROSECOND,
    Duration: lambda duration: duration // MICROSECOND,
}


class SqliteDialect(Dialect):
    """The embedded default."""

    name = "sqlite"
    syntax = SqliteSyntax()
    embedded = True
    one_writer = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counter = self.tables.counter
        last = select(counter.c.value).where(counter.c.name == LEASE_COUNTER)
        self._last_lease = last.scalar_subquery()
        self._claim = self._build_claim()
        self._claim_this = self.sql.claim_this(self._last_lease + 1)
        self._probe = self._build_probe()
        self._raise_leases = (
            sa.update(counter)
            .where(counter.c.name == LEASE_COUNTER)
            .values(value=counter.c.value + bindparam("count"))
        )

    # ---- in the caller's transaction -------------------------------------------------------------

    def now(self) -> datetime | None:
        return self.clock.now() or datetime.now(UTC)

    def refuse_unfit(self, connection: Connection) -> None:
        if not connection.in_transaction():
            connection.begin()  # an engine's own "begin" listener is what begins on some
        driver: Any = connection.connection.driver_connection
        if driver.in_transaction:
            self._refuse_unsafe_savepoint(connection, driver)
        elif driver.isolation_level is None or getattr(driver, "autocommit", None) is True:
            raise TransactionError(AUTOCOMMIT)

    def _refuse_unsafe_savepoint(self, connection: Connection, driver: Any) -> None:
        begins_by_itself = driver.isolation_level is not None
        if not begins_by_itself or not connection.in_nested_transaction():
            return
        if getattr(driver, "autocommit", None) is False or connection.dialect in _safe_savepoints:
            return
        raise TransactionError(
            "This SQLite connection may have no BEGIN before its SAVEPOINT, so releasing the "
            "savepoint would commit the job at once. Call "
            "cyclone_sqla.begin_before_savepoints(engine) once after create_engine(), or enqueue "
            "outside begin_nested()."
        )

    def has_tables(self, connection: Connection) -> bool:
        return sa.inspect(connection).has_table(self.tables.job.name, schema=self.schema)

    @contextmanager
    def enqueueing(self, connection: Connection) -> Generator[None]:
        try:
            yield
        except DBAPIError as exc:
            name = errorname_of(exc)
            if name == "SQLITE_BUSY_SNAPSHOT":
                raise SnapshotError(_SNAPSHOT) from exc
            if name.startswith("SQLITE_BUSY"):
                raise DatabaseBusyError(_busy(connection)) from exc
            if name.startswith(_BROKEN):
                # Whatever the application writes next would be committed without what came before.
                connection.invalidate(exc)
            raise

    def conflict_guard(
        self, connection: Connection, *, many: bool
    ) -> AbstractContextManager[object]:
        """None is needed: with the write lock, all duplicates are known before the first insert."""
        return nullcontext()

    def savepoint(self, connection: Connection) -> AbstractContextManager[object]:
        """An error of a statement does not end a transaction here."""
        return nullcontext()

    def draw_ids(self, connection: Connection, count: int) -> list[int]:
        """Take the write lock, so that nobody else inserts, and go on from the last id ever
        committed.
        """
        connection.execute(self._raise_leases, {"count": 0})
        last = connection.scalar(_LAST_ID) or 0
        return list(range(last + 1, last + 1 + count))

    def lock_sequence(self, connection: Connection, key: str) -> None:
        """Nothing to do: ids are given under the write lock, so their order is commit order."""

    def hint_sender(self, engine: Engine, url: sa.URL | None) -> HintSender:
        return local_sender(engine)

    # ---- in a worker's own transactions ----------------------------------------------------------

    def worker_engine(
        self, database: Engine | sa.URL, settings: WorkerSettings = DEFAULT_SETTINGS
    ) -> Engine:
        engine = _engine_like(database, pool_size=5, max_overflow=0)
        event.listen(engine, "connect", partial(_prepare, settings))
        event.listen(engine, "begin", _begin_as_asked)
        _beginning_as_asked.add(engine.dialect)
        return engine

    def adopt_engine(self, engine: Engine, settings: WorkerSettings) -> Engine:
        """On another engine than ours no step would begin with the write lock."""
        if engine.dialect in _beginning_as_asked:
            return engine
        return self.worker_engine(engine, settings)

    def session_engine(self, database: Engine | sa.URL, size: int) -> Engine:
        engine = _engine_like(database, **session_pool(size))
        _let_write(engine)
        return engine

    def async_session_engine(self, database: Engine | sa.URL, size: int) -> AsyncEngine:
        _refuse_unfit_file(database)
        engine = async_engine_like(database, "sqlite+aiosqlite", size)
        _let_write(engine.sync_engine)
        return engine

    def command_engine(self, database: Engine | sa.URL) -> Engine:
        """The driver itself waits for the write lock: a person can wait."""
        timeout = DEFAULT_SETTINGS.lock_timeout
        return sa.create_engine(worker_url(url_of(database)), connect_args={"timeout": timeout})

    def refuse_unfit_for_work(self, connection: Connection) -> None:
        if sqlite3.sqlite_version_info < OLDEST_VERSION:
            raise ConfigurationError(
                f"SQLite {sqlite3.sqlite_version} is too old: a worker needs 3.35 or later"
            )
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        if mode != "wal":
            raise ConfigurationError(
                f"This SQLite file is in journal mode {mode}, a worker needs wal: "
                "run `cyclone-sqla migrate`, which sets it."
            )

    def file_of(self, connection: Connection) -> Path | None:
        databases = connection.exec_driver_sql("PRAGMA database_list")
        path = next((row.file for row in databases if row.name == "main"), "")
        return Path(path) if path else None

    def hold(
        self, engine: Engine, settings: WorkerSettings, *, takes_turns: bool = False
    ) -> WorkerConnection:
        return SqliteConnection(engine, settings.effective_lock_timeout)

    def may_find_work(
        self, connection: Connection, queues: Collection[str], kinds: Collection[str]
    ) -> bool:
        """One indexed read, so that an idle worker takes no write lock."""
        bound = self.syntax.bind("kinds", {"kind": Text()}, [(kind,) for kind in kinds])
        bound |= self.syntax.bind("queues", {"queue": Text()}, [(queue,) for queue in queues])
        return connection.scalar(self._probe, bound) is not None

    def claim(
        self, connection: Connection, slots: Mapping[str, int], params: Mapping[str, Any]
    ) -> list[ClaimedJob]:
        jobs: list[ClaimedJob] = []
        kinds = self.syntax.bind("kinds", {"kind": Text()}, [(kind,) for kind in params["kinds"]])
        for queue, count in slots.items():
            given = {**params, **kinds, "of_queue": queue, "slots": count, "now": self.now()}
            claimed = claimed_jobs(connection.execute(self._claim, given).all())
            if claimed:
                connection.execute(self._raise_leases, {"count": len(claimed)})
            jobs += claimed
        return jobs

    def claim_this(self, connection: Connection, params: Mapping[str, Any]) -> list[ClaimedJob]:
        found = connection.execute(self._claim_this, {**params, "now": self.now()})
        claimed = claimed_jobs(found.all())
        if claimed:
            connection.execute(self._raise_leases, {"count": 1})
        return claimed

    def together(self, connection: Connection) -> AbstractContextManager[None]:
        return nullcontext()

    def sees_commits(self, connection: Connection) -> bool:
        return True  # a writer keeps all others out

    def is_passing(self, error: BaseException) -> bool:
        return errorname_of(error).startswith("SQLITE_BUSY")

    def is_conflict(self, error: BaseException) -> bool:
        is_ours = isinstance(error, DatabaseBusyError | SnapshotError)
        return is_ours or self.is_passing(error)

    def _build_probe(self) -> Any:
        job = self.tables.job
        kinds = self.syntax.rows("kinds", {"kind": Text()})
        queues = self.syntax.rows("queues", {"queue": Text()})
        first = (
            select(job.c.id)
            .where(
                predicate(IS_AVAILABLE),
                job.c.queue == queues.c.queue,
                job.c.kind == kinds.c.kind,
                self.sql.may_start(job),
            )
            .order_by(job.c.priority, job.c.id)  # or statistics may make it walk the whole table
            .limit(1)
            .scalar_subquery()
        )
        both = kinds.join(queues, sa.true())
        look = select(queues.c.queue).select_from(both).where(first.is_not(None))
        return look.where(self.sql.not_paused(queues.c.queue)).limit(1)

    def _build_claim(self) -> Any:
        """One queue; the first of every known kind, then the first of those.

        Leases go on from the counter.
        """
        job, first = self.tables.job.alias("candidate"), self.tables.job.alias("first")
        kinds = self.syntax.rows("kinds", {"kind": Text()})
        slots = bindparam("slots", type_=sa.Integer())
        firsts_of_kind = (
            select(first.c.id)
            .where(
                predicate(IS_AVAILABLE),
                first.c.queue == bindparam("of_queue"),
                first.c.kind == kinds.c.kind,
                self.sql.may_start(first),
            )
            .order_by(first.c.priority, first.c.id)
            .limit(slots)
            .correlate(kinds)
        )
        order = (job.c.priority, job.c.id)
        picked = (
            select(job.c.id, func.row_number().over(order_by=order).label("number"))
            .select_from(kinds.join(job, job.c.id.in_(firsts_of_kind)))
            .where(self.sql.not_paused(bindparam("of_queue")))
            .order_by(*order)
            .limit(slots)
            .subquery("picked")
        )
        target = self.tables.job
        lease = self._last_lease + picked.c.number
        return (
            sa.update(target)
            .where(target.c.id == picked.c.id)
            .values(self.sql.claim_values(lease))
            .returning(*self.sql.claimed)
        )


class SqliteConnection(WorkerConnection):
    """One connection; every write begins with the write lock, waited for here, fairly and for a
    time.

    SQLite's own busy handler sleeps up to 100 ms between tries and starves the neighbours of a busy
    worker. Only the BEGIN is repeated, so nothing is ever done twice.
    """

    def __init__(self, engine: Engine, lock_timeout: float) -> None:
        """``lock_timeout``: seconds to wait for the write lock before a step is given up."""
        self._engine = engine
        self._lock_timeout = lock_timeout
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        with self._begun("IMMEDIATE") as connection:
            yield connection

    step = transaction

    @contextmanager
    def reading(self) -> Generator[Connection]:
        with self._begun("DEFERRED") as connection:
            yield connection

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def _begun(self, mode: str) -> Generator[Connection]:
        with self._lock:
            if self._connection is None:
                self._connection = self._engine.connect()
            connection = self._connection.execution_options(cyclone_begin=mode)
            try:
                self._begin(connection)
                yield connection
                connection.commit()
            except BaseException:
                self._connection = None
                connection.close()
                raise

    def _begin(self, connection: Connection) -> None:
        give_up = time.monotonic() + self._lock_timeout
        while True:
            try:
                connection.begin()
            except DBAPIError as exc:
                if not errorname_of(exc).startswith("SQLITE_BUSY"):
                    raise
                if time.monotonic() > give_up:
                    raise DatabaseBusyError(
                        f"the SQLite write lock was held by others for {self._lock_timeout:g} s"
                    ) from exc
                connection.rollback()
                time.sleep(random.uniform(0.0005, 0.003))
            else:
                return


def _engine_like(database: Engine | sa.URL, **pool: Any) -> Engine:
    """An engine of the worker's own, whose connections are made as the application's are."""
    _refuse_unfit_file(database)
    pool["poolclass"] = QueuePool
    if isinstance(database, Engine) and not database.dialect.is_async:
        pool["creator"] = connecting_like(database)
    return sa.create_engine(worker_url(url_of(database)), **pool)


def _refuse_unfit_file(database: Engine | sa.URL) -> None:
    url = url_of(database)
    fault = _fault_of(url, database.pool if isinstance(database, Engine) else None)
    if fault is not None:
        raise ConfigurationError(
            f"A worker needs a SQLite file of its own connections; {url.render_as_string()} "
            f"{fault}. Use sqlite:///path/to/file.db."
        )


def _let_write(engine: Engine) -> None:
    """For units of work that read, then write: reads before the first write hold neither the lock
    nor a snapshot, which another commit would make unfit for writing.

    A SELECT … FOR UPDATE, which SQLite does not know, takes the lock: what it read stays true.
    """

    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute("PRAGMA busy_timeout=5000")

    def before_savepoint(connection: Connection, _name: str) -> None:
        _take_lock(connection)

    def before_execute(connection: Connection, statement: Any, *_: Any) -> None:
        if getattr(statement, "_for_update_arg", None) is not None:
            _take_lock(connection)

    event.listen(engine, "connect", prepare)
    event.listen(engine, "savepoint", before_savepoint)
    event.listen(engine, "before_execute", before_execute)
    _safe_savepoints.add(engine.dialect)


def _take_lock(connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def errorname_of(error: BaseException) -> str:
    """SQLite's name of an error (``SQLITE_BUSY_SNAPSHOT``); empty for anything else."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    return getattr(origin, "sqlite_errorname", "") or ""


def _prepare(settings: WorkerSettings, connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself
    # The first read opens the file, and is refused while another connection is closing it or
    # recovers its log. After it, this connection's reads wait for nobody.
    connection.execute(f"PRAGMA busy_timeout={round(settings.effective_lock_timeout * 1000)}")
    connection.execute("PRAGMA schema_version").fetchall()
    connection.execute("PRAGMA busy_timeout=0")  # waiting is ours, see SqliteConnection
    connection.execute(f"PRAGMA synchronous={settings.sqlite_synchronous.upper()}")
    connection.execute("PRAGMA journal_size_limit=16777216")
    connection.execute("PRAGMA foreign_keys=ON")  # history goes with its job


def _begin_as_asked(connection: Connection) -> None:
    mode = connection.get_execution_options().get("cyclone_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _fault_of(url: sa.URL, pool: sa.Pool | None) -> str | None:
    """Why a worker can't have connections of its own to this database; None if it can."""
    is_in_memory = (
        ":memory:" in (url.database or ":memory:")
        or url.query.get("mode") == "memory"
        or url.query.get("vfs") == "memdb"
    )
    if is_in_memory or isinstance(pool, StaticPool | SingletonThreadPool):
        return "is in memory or uses StaticPool"
    return "has a shared cache" if url.query.get("cache") == "shared" else None


def _busy(connection: Connection) -> str:
    driver: Any = connection.connection.driver_connection
    waited = ""
    if isinstance(driver, sqlite3.Connection):
        milliseconds = driver.execute("PRAGMA busy_timeout").fetchone()[0]
        waited = f" ({milliseconds / 1000:g} s)"
    return (
        f"Another process held the SQLite write lock longer than this engine's timeout{waited}. "
        "Nothing was enqueued and this transaction is still usable: try again, or raise "
        'connect_args={"timeout": …}.'
    )


_SNAPSHOT = (
    "This transaction read the database before another one changed it; SQLite can't let it write "
    "any more. Nothing was enqueued. Roll back and run the whole unit of work again, or start it "
    "with BEGIN IMMEDIATE."
)

_LAST_ID = sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'cyclone_job'")

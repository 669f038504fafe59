"""How a database is held still while its tables change: one migration at a time."""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import BigInteger, Connection, Engine, bindparam
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.dialects import dialect_of
from cyclone_sqla.dialects.postgresql import LOCK_NOT_AVAILABLE, sqlstate_of
from cyclone_sqla.dialects.sqlite import errorname_of
from cyclone_sqla.errors import (
    ConfigurationError,
    CycloneError,
    DatabaseBusyError,
    SchemaError,
    TransactionError,
)
from cyclone_sqla.settings import DEFAULT_SETTINGS
from cyclone_sqla.urls import url_of, worker_url

T = TypeVar("T")


def migrating(backend: str, lock_timeout: timedelta) -> Migrating:
    """What a migration needs of the kind of database that SQLAlchemy calls ``backend``."""
    if backend == "postgresql":
        return MigratingPostgres(lock_timeout)
    if backend == "sqlite":
        return MigratingSqlite(lock_timeout)
    raise ConfigurationError(f"{backend} is not supported: use PostgreSQL or SQLite")


class Migrating(ABC):
    """What a migration needs of one kind of database."""

    def __init__(self, lock_timeout: timedelta) -> None:
        """Args: lock_timeout: how long to wait for another migration, and for each table in use."""
        self.seconds = lock_timeout.total_seconds()
        self.milliseconds = max(1, round(self.seconds * 1000))  # 0 would be no limit

    @abstractmethod
    def transaction(self, database: Engine | sa.URL) -> AbstractContextManager[Connection]:
        """A transaction on a connection of our own, committed at the end."""

    @abstractmethod
    def reading(self, database: Engine | sa.URL) -> AbstractContextManager[Connection]:
        """A connection of our own that only reads."""

    @abstractmethod
    def held(self, connection: Connection, schema: str | None) -> AbstractContextManager[None]:
        """Nobody else migrates this schema until the connection's transaction ends.

        Raises:
            DatabaseBusyError: a lock was not free in time.
            TransactionError: the connection has no transaction that can be waited in.
        """

    @abstractmethod
    def make_schema(self, connection: Connection, schema: str) -> None:
        """Make sure that the schema is there."""

    @abstractmethod
    def preamble(self, schema: str | None) -> Sequence[sa.Executable]:
        """What a script that creates the tables starts with, before its transaction."""

    def schema_script(self, schema: str | None) -> Sequence[sa.Executable]:
        """What makes sure that the schema is there, in a script."""
        return []


class MigratingPostgres(Migrating):
    """An advisory lock that the end of the transaction frees, so it also works through a pooler."""

    @contextmanager
    def transaction(self, database: Engine | sa.URL) -> Generator[Connection]:
        if isinstance(database, sa.URL):
            # Those who wait for us find this name.
            database = database.update_query_dict({"fallback_application_name": APPLICATION_NAME})
        engine = own_engine(database)
        try:
            with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
                yield connection
        finally:
            engine.dispose()

    @contextmanager
    def reading(self, database: Engine | sa.URL) -> Generator[Connection]:
        engine = own_engine(database)
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()

    @contextmanager
    def held(self, connection: Connection, schema: str | None) -> Generator[None]:
        _refuse_unfit(connection)
        self._wait_for_others(connection, schema)
        with self._limited(connection):
            yield

    @contextmanager
    def _limited(self, connection: Connection) -> Generator[None]:
        """Wait for no lock on a table for ever: everybody else would queue up behind us."""
        before = connection.scalar(_LOCK_TIMEOUT)
        connection.execute(_SET_LOCK_TIMEOUT, {"value": f"{self.milliseconds}ms"})
        try:
            yield
        except DBAPIError as exc:  # the transaction is lost, and the setting with it
            if sqlstate_of(exc) != LOCK_NOT_AVAILABLE:
                raise
            raise DatabaseBusyError(
                f"a table of the queue was in use for more than {self.seconds:g} s; nothing was "
                "changed. Look for long transactions in pg_stat_activity, or stop the workers, and "
                "run it again"
            ) from exc
        except CycloneError:
            connection.execute(_SET_LOCK_TIMEOUT, {"value": before})
            raise
        connection.execute(_SET_LOCK_TIMEOUT, {"value": before})

    def make_schema(self, connection: Connection, schema: str) -> None:
        """Look first: CREATE SCHEMA IF NOT EXISTS needs a right that an existing schema doesn't."""
        if not sa.inspect(connection).has_schema(schema):
            connection.execute(CreateSchema(schema))

    def preamble(self, schema: str | None) -> Sequence[sa.Executable]:
        return self.schema_script(schema)

    def schema_script(self, schema: str | None) -> Sequence[sa.Executable]:
        return [CreateSchema(schema, if_not_exists=True)] if schema is not None else []

    def _wait_for_others(self, connection: Connection, schema: str | None) -> None:
        """Ask again and again: a lock_timeout would spoil the transaction and hide the holder."""
        key = _lock_key(schema or connection.scalar(_CURRENT_SCHEMA) or "")
        give_up = time.monotonic() + self.seconds
        while not connection.scalar(_TRY_LOCK, {"key": key}):
            if time.monotonic() > give_up:
                holder = connection.scalar(_HOLDER, {"key": key}) or "another session"
                raise DatabaseBusyError(
                    f"another migration has been running for more than {self.seconds:g} s: "
                    f"{holder}; nothing was changed"
                )
            time.sleep(random.uniform(0.05, 0.15))


class MigratingSqlite(Migrating):
    """The write lock of the file, which also lets go when its holder dies."""

    @contextmanager
    def transaction(self, database: Engine | sa.URL) -> Generator[Connection]:
        engine = own_engine(database)
        try:
            writing = engine.execution_options(cyclone_begin="IMMEDIATE")
            with self._patiently(writing.connect) as connection:
                self._set_wal(connection)
                self._patiently(lambda: self._begin(connection))
                yield connection
                connection.commit()
        finally:
            engine.dispose()

    @contextmanager
    def reading(self, database: Engine | sa.URL) -> Generator[Connection]:
        engine = sa.create_engine("sqlite://") if _is_missing(database) else own_engine(database)
        try:
            with self._patiently(engine.connect) as connection:
                driver: Any = connection.connection.driver_connection
                driver.execute(f"PRAGMA busy_timeout={self.milliseconds}")
                yield connection
        finally:
            engine.dispose()

    @contextmanager
    def held(self, connection: Connection, schema: str | None) -> Generator[None]:
        if not connection.in_transaction():
            connection.begin()
        try:
            self._patiently(lambda: _take_write_lock(connection))
            yield
        except DBAPIError as exc:
            if not _is_busy(exc):
                raise
            raise DatabaseBusyError(
                "another process wrote to the SQLite file meanwhile; nothing was changed: "
                "roll back and run it again"
            ) from exc

    def make_schema(self, connection: Connection, schema: str) -> None:
        """SQLite's schemas are attached files: nothing that a migration could make."""
        if schema not in sa.inspect(connection).get_schema_names():
            raise SchemaError(
                f"this SQLite connection has no schema {schema!r}: leave the schema out, or ATTACH "
                "a file under this name and migrate on that connection"
            )

    def preamble(self, schema: str | None) -> Sequence[sa.Executable]:
        return [sa.text("PRAGMA journal_mode=WAL")]

    def _set_wal(self, connection: Connection) -> None:
        """WAL belongs to the file, and can't be set inside a transaction."""
        driver: Any = connection.connection.driver_connection
        self._patiently(lambda: driver.execute("PRAGMA journal_mode=WAL").fetchall())
        (mode,) = self._patiently(lambda: driver.execute("PRAGMA journal_mode").fetchone())
        if mode != "wal":
            raise ConfigurationError(
                f"{connection.engine.url.database} stays in journal mode {mode}, a worker needs "
                "wal: put the file on a disk of this host"
            )

    def _begin(self, connection: Connection) -> None:
        try:
            connection.begin()
        except DBAPIError:
            connection.rollback()
            raise

    def _patiently(self, step: Callable[[], T]) -> T:
        """Try a step until the lock is free; it is the first one, so nothing is done twice."""
        give_up = time.monotonic() + self.seconds
        while True:
            try:
                return step()
            except Exception as exc:
                if not _is_busy(exc) or errorname_of(exc) == HOPELESS:
                    raise
                if time.monotonic() > give_up:
                    raise DatabaseBusyError(
                        "another process has held the SQLite write lock for more than "
                        f"{self.seconds:g} s; nothing was changed"
                    ) from exc
            time.sleep(random.uniform(0.0005, 0.003))


def own_engine(database: Engine | sa.URL) -> Engine:
    """An engine of our own for the application's database."""
    url = worker_url(url_of(database))
    dialect = dialect_of(url.get_backend_name(), None, DatabaseClock())
    # A statement that is prepared may be met again by someone else behind a transaction pooler.
    return dialect.worker_engine(database, replace(DEFAULT_SETTINGS, prepare=False))


def _take_write_lock(connection: Connection) -> None:
    """Take it before anything is read: two who read first could not both write.

    Python's sqlite3 begins at a write, and DDL is none to it: then the transaction begins here.
    Where the application has sent a BEGIN, only a write takes the lock.
    """
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    elif connection.get_execution_options().get("cyclone_begin") != "IMMEDIATE":
        connection.exec_driver_sql("CREATE TABLE cyclone_write_lock (taken)")
        connection.exec_driver_sql("DROP TABLE cyclone_write_lock")


def _is_missing(database: Engine | sa.URL) -> bool:
    """Whether connecting would create the file; an empty database in memory answers the same."""
    url = url_of(database)
    return bool(url.database) and not url.query and not Path(url.database or "").exists()


def _is_busy(error: Exception) -> bool:
    return errorname_of(error).startswith("SQLITE_BUSY")


def _refuse_unfit(connection: Connection) -> None:
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise TransactionError(
            "this connection is in AUTOCOMMIT, where a failed migration would leave half of "
            "itself: migrate in a transaction"
        )
    isolation = connection.scalar(_ISOLATION)
    if isolation not in ("read committed", "read uncommitted"):
        raise TransactionError(
            f"this transaction is {str(isolation).upper()}, so after waiting for another migration "
            "it could not see its work: use "
            'execution_options(isolation_level="READ COMMITTED")'
        )


def _lock_key(schema: str) -> int:
    digest = hashlib.sha256(f"cyclone-sqla migration of {schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


APPLICATION_NAME = "cyclone-sqla migrate"

HOPELESS = "SQLITE_BUSY_SNAPSHOT"
"""The transaction has read what another one changed since: it will never write."""

_KEY = bindparam("key", type_=BigInteger())
_TRY_LOCK = sa.select(sa.func.pg_try_advisory_xact_lock(_KEY))
_CURRENT_SCHEMA = sa.select(sa.func.current_schema())
_ISOLATION = sa.select(sa.func.current_setting("transaction_isolation"))
_LOCK_TIMEOUT = sa.select(sa.func.current_setting("lock_timeout"))
_SET_LOCK_TIMEOUT = sa.select(
    sa.func.set_config("lock_timeout", bindparam("value", type_=sa.Text()), True)
)

_HOLDER = sa.text("""
    SELECT format(
        'server process %s (%s from %s, since %s), which SELECT pg_terminate_backend(%s) would end',
        pid, coalesce(nullif(application_name, ''), usename, 'unknown'),
        coalesce(host(client_addr), 'this host'), to_char(xact_start, 'HH24:MI:SS TZ'), pid)
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (classid::bigint << 32) | objid::bigint = :key
""").bindparams(_KEY)

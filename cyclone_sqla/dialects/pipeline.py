"""Several statements in one round trip to PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy import Dialect as SqlalchemyDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

from cyclone_sqla.dialects.base import Rows, Step

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


class Pipeline:
    """Sends steps to the server all at once, as one READ COMMITTED transaction.

    Each has a snapshot of its own, as if the answer to the one before had been waited for. The
    statements go to the driver itself, so an engine's listeners for executions don't see them.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[SqlalchemyDialect, Any], _Compiled] = {}

    def fits(self, connection: Connection) -> bool:
        """Whether the connection is psycopg's synchronous kind, and its libpq 14 or later."""
        import psycopg

        driver = connection.connection.driver_connection
        return isinstance(driver, psycopg.Connection) and psycopg.Pipeline.is_supported()

    def run(self, connection: Connection, steps: Sequence[Step]) -> list[Rows]:
        """The rows of each step; on a connection whose transaction is open, in that one."""
        driver: Any = connection.connection.driver_connection
        calls = [self._call(connection, driver, step) for step in steps]
        if len(calls) > 1 and is_between_transactions(connection):
            calls = [partial(driver.execute, BEGIN), *calls, partial(driver.execute, "COMMIT")]
        with driver_errors(connection):
            cursors = _send(driver, calls, connection.dialect.loaded_dbapi.Error)
            rows: list[Rows] = [c.fetchall() if c.description else () for c in cursors]
        return rows[1:-1] if len(calls) > len(steps) else rows

    def _call(self, connection: Connection, driver: Any, step: Step) -> Callable[[], Any]:
        compiled = self._compile(connection, step.statement)
        cursor = driver.cursor(row_factory=compiled.rows)
        return partial(cursor.execute, compiled.sql, compiled.bind(step.params))

    def _compile(self, connection: Connection, statement: Any) -> _Compiled:
        key = (connection.dialect, statement)
        if key not in self._compiled:
            self._compiled[key] = _compiled(statement, connection.dialect)
        return self._compiled[key]


@dataclass
class _Compiled:
    """A statement's text, and what its parameters are turned into before they are sent."""

    sql: str
    compiler: SQLCompiler
    processors: Mapping[str, Callable[[Any], Any]]
    _row: Callable[[Sequence[Any]], Any] | None = None

    def bind(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        values = self.compiler.construct_params(dict(params))
        for name, process in self.processors.items():
            values[name] = process(values[name])
        return values

    def rows(self, cursor: Any) -> Callable[[Sequence[Any]], Any]:
        """The driver's row factory, which asks for the columns at the first answer alone."""
        from psycopg.rows import namedtuple_row

        if self._row is not None:
            return self._row
        row = namedtuple_row(cursor)
        if cursor.description:
            self._row = row
        return row


def _compiled(statement: Any, dialect: SqlalchemyDialect) -> _Compiled:
    compiler = statement.compile(dialect=dialect)
    processors = {
        name: process
        for parameter, name in compiler.bind_names.items()
        if (process := parameter.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    }
    return _Compiled(str(compiler), compiler, processors)


@contextmanager
def driver_errors(connection: Connection) -> Generator[None]:
    """Raises SQLAlchemy's errors for those of the driver, without a statement: it may be any of
    several. A connection that is lost is kept from its pool.
    """
    dialect = connection.dialect
    base = dialect.loaded_dbapi.Error
    driver = connection.connection.driver_connection
    try:
        yield
    except base as exc:
        if is_lost := _is_lost(driver):
            connection.invalidate(exc)
        raise DBAPIError.instance(
            None, None, exc, base, connection_invalidated=is_lost, dialect=dialect
        ) from exc


def _is_lost(driver: Any) -> bool:
    """Also where the driver can't leave a pipeline because its server has gone."""
    from psycopg.pq import PipelineStatus

    return bool(driver.closed or driver.pgconn.pipeline_status != PipelineStatus.OFF)


def is_between_transactions(connection: Connection) -> bool:
    """Whether the connection is in AUTOCOMMIT, and the next statement a transaction by itself.

    That is so of a worker's own alone.
    """
    import psycopg

    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection) or not driver.autocommit:
        return False
    return driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _send(driver: Any, calls: Sequence[Callable[[], Any]], base: type[BaseException]) -> list[Any]:
    """Make the calls in one round trip; the cursors that they return. One call needs no pipeline.

    The first error tells what was wrong. Those that follow only say that the pipeline is aborted,
    and one that leaves the block makes the driver log them.
    """
    if len(calls) == 1:
        return [calls[0]()]
    cursors: list[Any] = []
    first: BaseException | None = None
    try:
        with driver.pipeline():
            try:
                cursors = [call() for call in calls]
            except base as exc:
                first = exc
    except base as exc:
        first = first or exc
    if first is not None:
        raise first
    return cursors

"""A connection of the library's own: outside the application's pool, watched for its outages."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import ClauseElement, Dialect, Pool
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.sql.compiler import SQLCompiler

from cyclone_sqla.patience import Patience, within

T = TypeVar("T")

_ANSWER_WITHIN = 10.0
"""Seconds: the peer of a connection that stays silent for longer counts as gone."""

_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPALIVE": 10,  # macOS's name of TCP_KEEPIDLE
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": int(_ANSWER_WITHIN * 1000),
}
"""A peer that vanished without a word is noticed after 25 seconds at most, not after hours."""


class OwnConnection:
    """One connection outside every pool, in driver autocommit, made as an engine makes its own.

    It comes from a copy of the engine's pool: ``connect_args``, ``creator`` and the pool's events
    apply, and no slot of the pool itself is used, not even for a moment. The connection of an async
    driver runs on an event loop of its own, so that it works in a plain thread.

    It belongs to the thread that made it. Any error of the driver may come out of its methods; the
    connection is then to be closed. So it is of a database's silence for ten seconds, unless
    ``is_local``: a file always answers.
    """

    def __init__(self, pool: Pool, dialect: Dialect, *, is_local: bool = False) -> None:
        self._dialect = dialect
        self._patience: Patience | None = None
        self._runner = asyncio.Runner(loop_factory=_event_loop) if dialect.is_async else None
        self._compiled: dict[ClauseElement, SQLCompiler] = {}
        try:
            self._connection = self._connect(pool, is_local)
        except BaseException:
            self._end_loop()
            raise

    def execute(self, statement: ClauseElement, **parameters: Any) -> None:
        """Run one statement, which is its own transaction; its rows are thrown away."""
        compiled = self._compile(statement)
        self._call(self._execute, str(compiled), _driver_parameters(compiled, parameters))

    @property
    def driver_connection(self) -> Any:
        """The driver's own connection object."""
        return self._dialect.get_driver_connection(self._connection)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around what is asked of the driver's connection itself: silence is an error of its."""
        if self._patience is None:
            yield
            return
        self._patience.begin()
        try:
            yield
        finally:
            self._patience.end()

    def close(self) -> None:
        """End the connection. A broken one is dropped without an error."""
        try:
            self._call(self._dialect.do_terminate, self._connection)
        except Exception as error:  # noqa: BLE001 - any driver, and there is nothing left to save
            _log.debug("a broken connection could not be closed in peace: %r", error)
        finally:
            if self._patience is not None:
                self._patience.close()
            self._end_loop()

    def _connect(self, pool: Pool, is_local: bool) -> DBAPIConnection:
        if is_local or self._runner is not None:
            return self._call(self._open, pool)
        open_it = partial(self._open, pool)
        connection = within(_ANSWER_WITHIN, open_it, self._dialect.do_terminate)
        driver = self._dialect.get_driver_connection(connection)
        if hasattr(driver, "fileno"):
            self._patience = Patience(driver, _ANSWER_WITHIN)
        return connection

    def _open(self, pool: Pool) -> DBAPIConnection:
        pooled = pool.recreate().connect()
        try:
            pooled.commit()  # a "connect" listener may have left a transaction open
            connection = pooled.dbapi_connection
            assert connection is not None
            self._dialect.set_isolation_level(connection, "AUTOCOMMIT")
            keep_alive(pooled.driver_connection)
            pooled.detach()
        except BaseException:
            pooled.invalidate()
            raise
        return connection

    def _compile(self, statement: ClauseElement) -> SQLCompiler:
        if statement not in self._compiled:
            compiled = statement.compile(dialect=self._dialect)
            assert isinstance(compiled, SQLCompiler)
            self._compiled[statement] = compiled
        return self._compiled[statement]

    def _execute(self, sql: str, parameters: Any) -> None:
        cursor = self._connection.cursor()
        cursor.execute(sql, parameters)
        cursor.close()

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        if self._runner is None:
            with self.waiting():
                return function(*args)
        from sqlalchemy.util import greenlet_spawn

        running = greenlet_spawn(function, *args)
        return self._runner.run(asyncio.wait_for(running, _ANSWER_WITHIN))

    def _end_loop(self) -> None:
        if self._runner is not None:
            self._runner.close()


class Outage:
    """The troubles of one connection: how long to wait before the next try, and what to log.

    An outage is one line when it begins and one when it ends, however long it lasts; of those that
    follow within seconds of each other only the first is logged.
    """

    def __init__(self, log: logging.Logger, what: str, meanwhile: str) -> None:
        self._log = log
        self._what = what
        self._meanwhile = meanwhile
        self._failures = 0
        self._began = 0.0
        self._logged_at = -_QUIET
        self._logged = False

    def failed(self, error: BaseException) -> float:
        """Note a failure; the seconds to wait before the next try."""
        self._failures += 1
        if self._failures == 1:
            self._begin(error)
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures - 1, 10))
        return random.uniform(delay / 2, delay)

    def over(self) -> None:
        """Note that the connection works."""
        if self._logged:
            self._log.info("%s again, after %.1f s", self._what, time.monotonic() - self._began)
        self._failures = 0
        self._logged = False

    def _begin(self, error: BaseException) -> None:
        self._began = time.monotonic()
        self._logged = self._began - self._logged_at >= _QUIET
        if self._logged:
            self._logged_at = self._began
        level = logging.WARNING if self._logged else logging.DEBUG
        text = (str(error).splitlines() or [""])[0]
        self._log.log(
            level,
            "%s failed (%s: %s); %s, trying again",
            self._what,
            type(error).__name__,
            text,
            self._meanwhile,
        )


_log = logging.getLogger(__name__)

_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_QUIET = 10.0
"""Seconds after a logged outage in which another one is not worth a line."""


def _event_loop() -> asyncio.AbstractEventLoop:
    # Not epoll: a forked child would share it, and change what the parent waits for.
    return asyncio.SelectorEventLoop(selectors.PollSelector())


def _driver_parameters(compiled: SQLCompiler, parameters: dict[str, Any]) -> Any:
    values = compiled.construct_params(parameters)
    if not compiled.positional:
        return values
    return tuple(values[name] for name in compiled.positiontup or ())


def keep_alive(driver_connection: Any) -> None:
    """Let the system notice that the peer has gone, where the driver shows its socket."""
    fileno = getattr(driver_connection, "fileno", None)
    if fileno is None:
        return
    with socket.socket(fileno=os.dup(fileno())) as twin:  # options belong to both
        if twin.family not in (socket.AF_INET, socket.AF_INET6):
            return
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                twin.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""What a work loop sleeps on: the receiving half of the wake-up.

A :class:`Wakeup` is set by whoever knows of work: a source of this module (other processes), or
another thread of the worker. A source may be deaf for a while; polling bounds every delay. After it
could not hear it wakes the loop once, so that nothing waits for a hint that nobody heard.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Engine

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.hint_senders import NOTIFY, local_sender, notify_channel
from cyclone_sqla.own_connection import Outage, OwnConnection

if TYPE_CHECKING:
    import sqlite3

    import psycopg

_log = logging.getLogger(__name__)


RUN_ENDED = "\x01ended"
"""In the place of a queue's name: a run has ended here, which says nothing of new jobs."""


class Wakeup:
    """A flag with the names of the queues that may have work; ``queues`` are those that it serves.

    The loop waits, which clears the flag, *then* looks: a call that comes while it looks is kept
    for the next wait. Calls for queues that nobody serves here are ignored. ``errands`` are other
    names that it can be called by; a call for all queues is none for them.
    """

    def __init__(self, queues: Iterable[str], errands: Iterable[str] = ()) -> None:
        self._queues = frozenset(queues)
        self._served = self._queues.union(errands)
        self._called: set[str] = set()
        self._is_set = False
        self._changed = threading.Condition()  # re-entrant: a signal handler may call set()

    def wait(self, timeout: float) -> frozenset[str] | None:
        """The queues to look into, as soon as there is a call; None after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_set, timeout):
                return None
            called, self._called = frozenset(self._called), set()
            self._is_set = False
            return called

    def set(self, *queues: str) -> None:
        """Wake the loop for these queues, without any for all of them. Never waits or raises."""
        called = self._served.intersection(queues) if queues else self._queues
        if queues and not called:
            return
        if self._is_set and called <= self._called:
            return  # a wait that has begun since then took notice of it: it clears both
        with self._changed:
            self._called |= called
            self._is_set = True
            self._changed.notify()


class Linger:
    """How long to sleep before the next look: briefly after a wake-up, then the ``poll`` interval.

    A look that finds nothing is no proof: rows may have been locked for that moment, or the commit
    was not visible yet. So the loop looks again after 1, 5 and 25 ms before it sleeps.
    """

    _STEPS = (0.001, 0.005, 0.025)

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._step = len(self._STEPS)

    def reset(self, *, to: int = 0) -> None:
        """Begin again with the shortest sleep: something was found, or announced. ``to`` leaves out
        the first.
        """
        self._step = to

    def next_wait(self) -> float:
        """Seconds to sleep now; each call is one step further."""
        if self._step < len(self._STEPS):
            self._step += 1
            return self._STEPS[self._step - 1]
        return self._poll * random.uniform(0.8, 1.0)  # workers that started together drift apart


class Source(ABC):
    """Hears of new jobs on a connection of its own, in a daemon thread, and sets the wake-up.

    No error ends the thread: it connects again, with back-off, until :meth:`stop`.
    """

    _DEAF_FOR = 300.0
    """Seconds until it tries again where nothing can be heard."""

    def __init__(self, wakeup: Wakeup, engine: Engine) -> None:
        self._wakeup = wakeup
        self._engine = engine
        self._stopping = threading.Event()
        self._hearing = threading.Event()
        self._outage = Outage(_log, "Listening for new jobs", "the worker polls meanwhile")
        self._thread = threading.Thread(target=self._run, name="cyclone-wakeup", daemon=True)

    def start(self) -> None:
        """Begin to listen, once in its life. Doesn't wait for the connection."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread and its connection, and wait for that up to ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def healthy(self) -> bool:
        """Whether it hears now. While it doesn't, new jobs start within the poll interval."""
        return self._hearing.is_set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with closing(self._connect()) as connection:
                    self._listen(connection)
                pause = self._DEAF_FOR
            except Exception as error:  # noqa: BLE001 - any driver, and this thread must live
                pause = self._outage.failed(error)
            self._hearing.clear()
            self._stopping.wait(pause)

    def _connect(self) -> OwnConnection:
        return OwnConnection(self._engine.pool, self._engine.dialect)

    @abstractmethod
    def _listen(self, own: OwnConnection) -> None:
        """Listen on this connection until told to stop, or return if nothing can be heard.

        A lost connection raises.
        """

    def _heard_from_now_on(self) -> None:
        self._outage.over()
        self._wakeup.set()  # for what came while nobody listened
        self._hearing.set()


class PostgresListener(Source):
    """LISTENs on a channel; ``engine`` is one of psycopg, if possible straight to the server.

    Nothing is heard through a pooler that lends a server connection to each transaction. That is
    found out when connecting and said once, and the worker polls.
    """

    _PATIENCE = 0.5
    """Seconds until a request to stop is noticed."""

    _SILENCE = 30.0
    """Seconds without a call after which the connection has to prove that it is alive."""

    _ECHO_WITHIN = 5.0
    """Seconds that a notification may take through a pooler."""

    def __init__(self, wakeup: Wakeup, engine: Engine, channel: str) -> None:
        super().__init__(wakeup, engine)
        self._channel = channel
        self._said_deaf = False

    def _listen(self, own: OwnConnection) -> None:
        connection: psycopg.Connection[Any] = own.driver_connection
        if not self._can_hear(own):
            self._say_deaf()
            return
        _ask(own, b"LISTEN " + self._channel.encode())
        self._heard_from_now_on()
        proved_at = time.monotonic()
        while not self._stopping.is_set():
            if self._take_calls(connection):
                proved_at = time.monotonic()
            elif time.monotonic() - proved_at > self._SILENCE:
                _ask(own, b"SELECT 1")
                self._wakeup.set()  # a call that came with the answer may be lost
                proved_at = time.monotonic()

    def _take_calls(self, connection: psycopg.Connection[Any]) -> bool:
        called = False
        for call in connection.notifies(timeout=self._PATIENCE):
            called = True
            self._wakeup.set(call.payload)
        return called

    def _can_hear(self, own: OwnConnection) -> bool:
        """Whether calls arrive: always from the server itself, not from every pooler."""
        connection: psycopg.Connection[Any] = own.driver_connection
        if _ask(own, b"SELECT pg_backend_pid()").fetchone() == (connection.info.backend_pid,):
            return True
        # A pooler tells a number of its own. On a channel that nobody else will ever use, because
        # LISTEN stays behind on the server connection that it borrowed.
        channel = f"cyclone_echo_{uuid4().hex}"
        _ask(own, b"LISTEN " + channel.encode())
        with closing(self._connect()) as other:
            other.execute(NOTIFY, channels=[channel], queues=["echo"])
        return bool(list(connection.notifies(timeout=self._ECHO_WITHIN, stop_after=1)))

    def _say_deaf(self) -> None:
        if not self._said_deaf:
            self._said_deaf = True
            _log.warning(
                "Notifications don't reach this worker, probably because a connection pooler in "
                "transaction mode is between; it finds new jobs by polling alone. "
                "Give it a direct listen_url to be woken at once."
            )


def _ask(own: OwnConnection, sql: bytes) -> psycopg.Cursor[Any]:
    """Execute on the driver's connection; silence is an error."""
    connection: psycopg.Connection[Any] = own.driver_connection
    with own.waiting():
        return connection.execute(sql)


class SqliteWatcher(Source):
    """Watches a SQLite file for commits of other connections; ``engine`` is the worker's own.

    Any commit wakes the loop, whatever it changed: a look costs microseconds. Enqueues of this
    process call directly.
    """

    def __init__(self, wakeup: Wakeup, engine: Engine) -> None:
        super().__init__(wakeup, engine)
        self._sender = local_sender(engine)
        self._nudged = threading.Event()

    def start(self) -> None:
        """Begin to watch, once in its life."""
        self._sender.subscribe(self._call)
        super().start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread and its connection, and wait for that up to ``timeout`` seconds."""
        self._sender.unsubscribe(self._call)
        self._stopping.set()
        self._nudged.set()
        super().stop(timeout)

    def _call(self, queues: Collection[str]) -> None:
        self._wakeup.set(*queues)
        self._nudged.set()  # to look closely: this commit may not have returned yet

    def _connect(self) -> OwnConnection:
        return OwnConnection(self._engine.pool, self._engine.dialect, is_local=True)

    def _listen(self, own: OwnConnection) -> None:
        connection: sqlite3.Connection = own.driver_connection
        pace = _Pace()
        seen = _data_version(connection)
        self._heard_from_now_on()
        while not self._stopping.is_set():
            if self._nudged.wait(pace.next_wait()):
                self._nudged.clear()
                pace.hurry()
            version = _data_version(connection)
            if version != seen:
                seen = version
                pace.hurry()
                self._wakeup.set()


class _Pace:
    """How often to look at the file: every 2 ms for a second after it changed, then ever slower."""

    _SHORTEST = 0.002
    _LONGEST = 0.05
    _HURRY = 1.0

    def __init__(self) -> None:
        self.hurry()

    def hurry(self) -> None:
        self._wait = self._SHORTEST
        self._hurry_until = time.monotonic() + self._HURRY

    def next_wait(self) -> float:
        if time.monotonic() > self._hurry_until:
            self._wait = min(self._wait * 2, self._LONGEST)
        return self._wait


def _data_version(connection: sqlite3.Connection) -> int:
    """A number that changes with every commit of another connection: 4 µs, and no transaction."""
    version: int = connection.execute("PRAGMA data_version").fetchone()[0]
    return version


def source_on(engine: Engine, dialect: Dialect, wakeup: Wakeup) -> Source:
    """What hears of new jobs on a database, over connections of this engine."""
    if dialect.notifies:
        return PostgresListener(wakeup, engine, notify_channel(dialect.schema))
    return SqliteWatcher(wakeup, engine)

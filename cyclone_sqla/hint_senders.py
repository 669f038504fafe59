"""How a hint reaches the workers: by ``pg_notify`` from a thread, or by a call in the process."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from sqlalchemy import URL, Connection, Dialect, Engine, Pool, Transaction, create_engine, text
from sqlalchemy.pool import NullPool

from cyclone_sqla.hints import Hint
from cyclone_sqla.own_connection import Outage, OwnConnection

_TELLING = (
    "pg_notify(channel, queue)"
    " FROM unnest(CAST(:channels AS text[]), CAST(:queues AS text[])) AS hint(channel, queue)"
)

NOTIFY = text(f"SELECT {_TELLING}")
"""Tells the listeners of PostgreSQL about any number of queues in one round trip."""

_HINT = text(f"SELECT set_config('synchronous_commit', 'off', true), {_TELLING}")
"""The same as a transaction of its own, which need not outlive the server: no flush to disk."""

_SHORTEST_SPACING = 0.002
_LONGEST_SPACING = 0.008
"""Seconds between two statements of one sender: longer while more hints wait each time, for workers
in such a stream are awake.
"""

_LOOK = 0.001
"""Seconds between two looks whether commits have returned whose transactions somebody still holds.
"""

_IDLE = 60.0
"""Seconds without a hint after which a sender gives its connection and its thread back."""

_LONGEST_COMMIT = 10.0
"""Seconds after which a hint no longer waits for its commit to return."""

_EXIT_WITHIN = 0.2
"""Seconds by which the end of the process may be delayed for hints that have not left yet."""

_FORK_WITHIN = 0.2
"""Seconds by which a fork may be delayed until no sender is inside its driver."""

_log = logging.getLogger(__name__)


@cache
def notify_channel(schema: str | None) -> str:
    """The channel of the jobs in ``schema``: an identifier that never needs quotes."""
    return "cyclone_" + hashlib.sha256((schema or "").encode()).hexdigest()[:12]


def notify_in_transaction(connection: Connection, channel: str, queues: Iterable[str]) -> None:
    """Notify from inside the caller's transaction: exact, and dear.

    PostgreSQL lets transactions that notify commit one by one (where a commit takes 5 ms, that is
    170 a second in the whole server), and refuses to PREPARE one.
    """
    names = list(queues)
    connection.execute(NOTIFY, {"channels": [channel] * len(names), "queues": names})


def notify_sender(engine: Engine) -> NotifySender:
    """The one sender of this process for the database of ``engine``."""
    pool = engine.pool  # engines made by execution_options() share it; dispose() makes a new one
    sender = _notify_senders.get(pool)
    if sender is None:
        sender = _notify_senders.setdefault(pool, NotifySender(pool, engine.dialect))
    return sender


@cache
def hint_engine(url: URL) -> Engine:
    """An engine to send hints through instead of the application's: one per URL.

    For an application whose connections can't be made in another thread or event loop, for example
    because its ``async_creator`` belongs to one. Its ``connect_args`` are not known here.
    """
    return create_engine(url, poolclass=NullPool)


class NotifySender:
    """Sends hints to the listeners of one PostgreSQL database, from a daemon thread.

    The first hint starts the thread. It opens an :class:`OwnConnection`, collects what comes in and
    sends it in one statement, at most one per two milliseconds, or eight while they stream in.
    After a minute without hints the connection and the thread are gone again, and at once when the
    engine is disposed of.
    """

    _changed: threading.Condition
    _in_driver: threading.Lock
    _hints: set[Hint]
    _committing: list[_Committing]
    _leaving: bool
    _spacing: float
    _thread: threading.Thread | None

    def __init__(self, pool: Pool, dialect: Dialect) -> None:
        self._pool = weakref.ref(pool)
        self._dialect = dialect
        self._connection: OwnConnection | None = None
        self._outage = Outage(_log, "Sending hints to workers", "workers find jobs by polling")
        self._begin()
        _all_senders.add(self)
        weakref.finalize(pool, self.leave).atexit = False

    def send(self, hints: Collection[Hint]) -> None:
        """Send soon: within milliseconds, while the connection is there."""
        with self._changed:
            self._hints.update(hints)
            self._wake()

    def send_after(self, transaction: Transaction, hints: Collection[Hint]) -> None:
        """Send as soon as the commit of ``transaction``, which is under way, has returned.

        Nobody says when that is. But most let go of the transaction then, which is called for at
        once; at the others the thread looks.
        """
        began = time.monotonic()
        with self._changed:
            held = weakref.ref(transaction, self._look)
            self._committing.append(_Committing(held, hints, began))
            self._wake()

    def close(self, timeout: float = _EXIT_WITHIN) -> None:
        """Send what is there, for ``timeout`` seconds at most, and end thread and connection.

        A hint that comes later opens them again.
        """
        thread = self.leave()
        if thread is not None:
            thread.join(timeout)

    def leave(self) -> threading.Thread | None:
        """Like ``close``, without waiting. The thread that ends soon, if there is one."""
        with self._changed:
            self._leaving = True
            self._changed.notify()
            return self._thread

    def rest(self, timeout: float) -> bool:
        """Wait until the thread is outside the driver, and keep it out until :meth:`go_on`.

        False if it is still inside after ``timeout`` seconds; it then isn't kept out.
        """
        return self._in_driver.acquire(timeout=timeout)

    def go_on(self) -> None:
        """Let the thread speak again."""
        self._in_driver.release()

    def begin_in_child(self) -> None:
        """Begin anew after a fork: thread, connection and what was waiting are the parent's."""
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None
        self._begin()

    def _begin(self) -> None:
        # Re-entrant: the garbage collector may call leave() anywhere.
        self._changed = threading.Condition(threading.RLock())
        self._in_driver = threading.Lock()
        self._hints = set()
        self._committing = []
        self._leaving = False
        self._thread = None
        self._spacing = _SHORTEST_SPACING

    def _look(self, _gone: object) -> None:
        """In the thread that let go of a transaction, or wherever the garbage collector runs: so it
        never waits. The thread that is missed looks by itself, a little later.
        """
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def _wake(self) -> None:
        if self._thread is not None:
            self._changed.notify()
            return
        self._leaving = False
        thread = threading.Thread(target=self._run, name="cyclone-hints", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or the system is out of threads
            _log.debug("no thread to send hints from: %s", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            if hints := self._collect():
                self._deliver(hints)
                continue
            self._disconnect()
            if self._ended():
                return

    def _collect(self) -> set[Hint]:
        """Wait for hints and take all of them; none when it is time to give the connection back."""
        idle_at = time.monotonic() + _IDLE
        with self._changed:
            while True:
                now = time.monotonic()
                self._take_ended_commits(now)
                left = idle_at - now
                if self._hints or (not self._committing and (self._leaving or left <= 0)):
                    hints, self._hints = self._hints, set()
                    return hints
                self._changed.wait(_LOOK if self._committing else left)

    def _take_ended_commits(self, now: float) -> None:
        for commit in self._committing[:]:
            if commit.has_returned() or now > commit.began + _LONGEST_COMMIT:
                self._committing.remove(commit)
                self._hints.update(commit.hints)

    def _ended(self) -> bool:
        with self._changed:
            if self._hints or self._committing:
                return False  # it came while the connection was being closed
            self._thread = None
            return True

    def _deliver(self, hints: set[Hint]) -> None:
        was_connected = self._connection is not None
        try:
            with self._in_driver:
                self._speak(hints)
        except Exception as error:  # noqa: BLE001 - whatever a creator or a driver raises
            is_connected = self._connection is not None
            self._disconnect()
            if was_connected:  # a restarted server, an idle timeout: at once again, connected anew
                self._take_back(hints)
            else:  # what a new connection refuses would be refused for ever
                self._back_off(error, set() if is_connected else hints)
        else:
            self._outage.over()
            self._pause()

    def _pause(self) -> None:
        time.sleep(self._spacing)
        with self._changed:
            is_stream = bool(self._hints or self._committing)
        longer = min(2 * self._spacing, _LONGEST_SPACING)
        self._spacing = longer if is_stream else _SHORTEST_SPACING

    def _speak(self, hints: set[Hint]) -> None:
        channels, queues = zip(*hints, strict=True)
        self._connected().execute(_HINT, channels=list(channels), queues=list(queues))

    def _connected(self) -> OwnConnection:
        if self._connection is None:
            pool = self._pool()
            if pool is None:
                raise ConnectionError("the engine was disposed of")
            self._connection = OwnConnection(pool, self._dialect)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with self._in_driver:
                self._connection.close()
            self._connection = None

    def _back_off(self, error: Exception, hints: set[Hint]) -> None:
        with self._changed:
            if self._leaving or self._pool() is None:
                _log.debug("hints were dropped at the end: %r", error)
                return
            self._take_back(hints)
            self._changed.wait_for(lambda: self._leaving, self._outage.failed(error))

    def _take_back(self, hints: set[Hint]) -> None:
        with self._changed:
            self._hints.update(hints)


class _Committing(NamedTuple):
    """Hints that wait for a commit to return, which ``began`` then on the monotonic clock."""

    transaction: weakref.ref[Transaction]
    hints: Collection[Hint]
    began: float

    def has_returned(self) -> bool:
        """The committing thread clears the flag once its commit has returned, error or not."""
        transaction = self.transaction()
        return transaction is None or not transaction.is_active


_notify_senders: weakref.WeakKeyDictionary[Pool, NotifySender] = weakref.WeakKeyDictionary()
_all_senders: weakref.WeakSet[NotifySender] = weakref.WeakSet()

_inherited: list[OwnConnection] = []
"""In a forked child, the parent's connections: kept, for closing one would speak for the parent."""

_resting: list[NotifySender] = []
"""Senders that are kept out of their drivers while a thread forks."""


def _before_fork() -> None:
    """Let no thread be inside a driver: what it locks there, in OpenSSL say, no child unlocks."""
    deadline = time.monotonic() + _FORK_WITHIN
    senders = list(_all_senders)
    _resting.extend(each for each in senders if each.rest(max(0.0, deadline - time.monotonic())))


def _after_fork_in_parent() -> None:
    while _resting:
        _resting.pop().go_on()


def _after_fork_in_child() -> None:
    _resting.clear()
    for sender in list(_all_senders):
        sender.begin_in_child()


def _at_exit() -> None:
    deadline = time.monotonic() + _EXIT_WITHIN
    threads = [sender.leave() for sender in list(_all_senders)]
    for thread in threads:
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


def local_sender(engine: Engine) -> LocalSender:
    """The sender to the workers of this process that work on the same SQLite file as ``engine``."""
    sender = _local_senders.get(engine.pool)
    if sender is None:
        file = _database_file(engine.url)
        sender = _senders_of_files.setdefault(file, LocalSender()) if file else LocalSender()
        _local_senders[engine.pool] = sender
    return sender


class LocalSender:
    """Calls the workers of this process; those of other processes watch the file itself."""

    def __init__(self) -> None:
        self._receivers: tuple[Callable[[Collection[str]], None], ...] = ()
        self._changing = threading.Lock()

    def send(self, hints: Collection[Hint]) -> None:
        """Call every receiver with the names of the queues."""
        queues = {hint.queue for hint in hints}
        for receive in self._receivers:
            receive(queues)

    def send_after(self, transaction: Transaction, hints: Collection[Hint]) -> None:
        """Call them now: a receiver looks closely for a while, and will see the commit come."""
        self.send(hints)

    def subscribe(self, receive: Callable[[Collection[str]], None]) -> None:
        """Call ``receive`` from now on, in the thread that commits: it must not wait or raise."""
        with self._changing:
            self._receivers = (*self._receivers, receive)

    def unsubscribe(self, receive: Callable[[Collection[str]], None]) -> None:
        """Call ``receive`` no more."""
        with self._changing:
            self._receivers = tuple(each for each in self._receivers if each != receive)


_senders_of_files: dict[str, LocalSender] = {}
_local_senders: weakref.WeakKeyDictionary[Pool, LocalSender] = weakref.WeakKeyDictionary()


def _database_file(url: URL) -> str | None:
    """The real path of the database file; None for a database in memory."""
    name = url.database or ":memory:"
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    return None if name == ":memory:" else os.path.realpath(name)

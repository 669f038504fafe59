"""An end to waiting for a database that has fallen silent.

A thread that waits inside a driver can't be woken. But the connection that it waits on can be cut
from another thread: the driver then finds it closed, and raises as for any that was lost.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")

_LONGEST_PAUSE = 1.0
"""Seconds at most between two looks at those who wait."""


class Patience:
    """That with one connection: a wait may take ``limit`` seconds, then the connection is cut.

    A wait costs its thread a look at the clock: one thread of the process watches all of them.
    """

    __slots__ = ("_since", "_twin", "limit", "was_cut")

    def __init__(self, driver_connection: Any, limit: float) -> None:
        """``driver_connection`` is one of a driver that shows its socket by ``fileno()``."""
        self.limit = limit
        self.was_cut = False
        self._since = inf
        # Of our own, so that nobody else's socket can have come to its number.
        self._twin = socket.socket(fileno=os.dup(driver_connection.fileno()))
        _watch.add(self)

    def begin(self) -> None:
        """A wait begins."""
        self._since = monotonic()

    def end(self) -> None:
        """It is over."""
        self._since = inf

    @property
    def waiting(self) -> float:
        """Seconds that the present wait has taken; 0.0 if there is none."""
        return max(0.0, monotonic() - self._since)

    def cut(self) -> None:
        """End the connection, and with it the present wait."""
        self.was_cut = True
        with suppress(OSError):  # it is closed already
            self._twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Watch no more: the connection is given up."""
        _watch.discard(self)
        self._twin.close()


def within(seconds: float, connect: Callable[[], T], drop: Callable[[T], object]) -> T:
    """What ``connect`` returns or raises, called in a thread of its own.

    TimeoutError if that takes too long; a connection that comes later is handed to ``drop``.
    """
    connecting: Future[T] = Future()
    thread = threading.Thread(
        target=_keep_promise, args=(connecting, connect), name="cyclone-connect", daemon=True
    )
    thread.start()
    try:
        return connecting.result(seconds)
    except TimeoutError:
        connecting.add_done_callback(lambda late: late.exception() or drop(late.result()))
        raise


def _keep_promise(promise: Future[T], keep: Callable[[], T]) -> None:
    try:
        promise.set_result(keep())
    except BaseException as exc:  # noqa: BLE001 - it is raised where it is waited for
        promise.set_exception(exc)


class _Watch:
    """One thread for all connections of the process, while there are any."""

    _changed: threading.Condition
    _watched: set[Patience]
    _thread: threading.Thread | None

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """At first, and in a forked child: thread and connections are the parent's."""
        self._changed = threading.Condition()
        self._watched = set()
        self._thread = None

    def add(self, patience: Patience) -> None:
        with self._changed:
            self._watched.add(patience)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="cyclone-patience", daemon=True)
                thread.start()
                self._thread = thread

    def discard(self, patience: Patience) -> None:
        with self._changed:
            self._watched.discard(patience)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._watched:
                for patience in self._watched:
                    if patience.waiting > patience.limit and not patience.was_cut:
                        patience.cut()
                shortest = min(patience.limit for patience in self._watched)
                self._changed.wait(min(shortest / 4, _LONGEST_PAUSE))
            self._thread = None


_watch = _Watch()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch.begin)

"""Signals as something to wait for: nothing of ours runs inside a handler."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What a service manager and a person at a terminal send to end a process."""

PARENT_GONE = 0
"""Comes among the signals when the other end of ``parent`` was closed; none has this number."""


class SignalPipe:
    """Catches signals, from now until the process ends; to be made in the main thread.

    The operating system's handler writes the number of each into a pipe at once. So a thread that
    waits here learns of it while the main one is busy in a driver's C code, and no lock that the
    main thread holds at that moment can be in the way.
    """

    def __init__(self, signals: Iterable[signal.Signals], parent: int | None = None) -> None:
        """``parent``: the reading end of a pipe that a parent process holds open while it lives."""
        self._signals = frozenset(signals)
        self._parent = parent
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, _taken_from_the_pipe)

    def wait(self, timeout: float | None = None) -> list[int]:
        """The numbers of the signals that have come since, waiting ``timeout`` seconds for one.

        ``PARENT_GONE`` comes once. Empty after the timeout, or a nudge.
        """
        files = [file for file in (self._reading, self._parent) if file is not None]
        ready, _, _ = select.select(files, [], [], timeout)
        came: list[int] = []
        if self._reading in ready:
            came += [number for number in os.read(self._reading, 1024) if number in self._signals]
        if self._parent in ready:
            self._parent = None
            came.append(PARENT_GONE)
        return came

    def nudge(self) -> None:
        """Have the present ``wait`` return."""
        os.write(self._writing, b"\0")


def _taken_from_the_pipe(_number: int, _frame: FrameType | None) -> None:
    """A handler of Python's must be set, or the system's would not write into the pipe."""

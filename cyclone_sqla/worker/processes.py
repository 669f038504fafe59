"""Several worker processes under one parent that does nothing but look after them.

The parent opens no connection to the database. A child is a new interpreter, never a fork, so
it shares no connection with anybody.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from time import monotonic

from cyclone_sqla.backoff import BackoffPolicy, Exponential
from cyclone_sqla.worker.signals import STOP_SIGNALS, SignalPipe

log = logging.getLogger("cyclone_sqla.worker")

RESTART_BACKOFF = Exponential(base=0.5, factor=2, cap=60)
"""How long a child that crashed stays down; it grows with each crash in a row."""

STEADY_AFTER = 60.0
"""Seconds of life after which a crash counts as the first one again."""


class Processes:
    """Keeps ``count`` worker processes running until it is told to stop.

    SIGTERM and SIGINT stop the children gracefully, a second one kills them. The children learn of
    the first through a pipe that closes, which it also does when the parent dies, in whatever way:
    then they stop by themselves. (Signals would be counted twice where a terminal or a service
    manager sends its own to every process.)

    ``command`` makes the command line of the n-th child, from n = 1 and the file descriptor of the
    pipe. A child that ends with one of the ``fatal`` codes would end so for ever: it stops all. One
    that ends with the code ``renewed`` has done its share, and is started again at once.
    Those that are still there ``patience`` seconds after the stop are killed.
    """

    def __init__(
        self,
        command: Callable[[int, int], Sequence[str]],
        count: int,
        *,
        fatal: Collection[int],
        patience: float,
        renewed: int | None = None,
        backoff: BackoffPolicy = RESTART_BACKOFF,
    ) -> None:
        self._fatal = fatal
        self._patience = patience
        self._renewed = renewed
        self._pipe, self._word = os.pipe()
        self._children = [
            _Child(number, command(number, self._pipe), self._pipe, backoff)
            for number in range(1, count + 1)
        ]

    def run(self) -> int | None:
        """Work until told to stop; the exit code of the child that ended worst.

        None after a second signal.
        """
        signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        try:
            for child in self._children:
                child.start()
            log.info("started %d worker processes: %s", len(self._children), self._pids())
            while not self._is_told(signals.wait(self._until_next_start())):
                self._start_those_due()
            return self._stop(signals)
        finally:
            self._kill()

    def _is_told(self, signals: list[int]) -> bool:
        """Whether to stop: somebody said so, or a child ended in a way that no restart can mend."""
        for child in self._children:
            child.look(self._fatal, self._renewed)
        return bool(self._fatal_codes()) or any(number in STOP_SIGNALS for number in signals)

    def _fatal_codes(self) -> list[int]:
        codes = [child.exit_code or 0 for child in self._children]
        return [code for code in codes if code in self._fatal]

    def _until_next_start(self) -> float | None:
        due = [child.start_at for child in self._children if child.start_at is not None]
        return max(0.0, min(due) - monotonic()) if due else None

    def _start_those_due(self) -> None:
        for child in self._children:
            if child.start_at is not None and child.start_at <= monotonic():
                child.start()

    def _stop(self, signals: SignalPipe) -> int | None:
        os.close(self._word)
        give_up = monotonic() + self._patience
        while any(child.pid is not None for child in self._children):
            if (left := give_up - monotonic()) <= 0:
                log.error("killing the worker processes that would not end: %s", self._pids())
                self._kill()
            elif any(number in STOP_SIGNALS for number in signals.wait(left)):
                return None
        return max(self._fatal_codes() or [self._end_of(child) for child in self._children])

    def _end_of(self, child: _Child) -> int:
        code = child.exit_code or 0
        return 0 if code == self._renewed else code

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _pids(self) -> str:
        return ", ".join(str(child.pid) for child in self._children if child.pid is not None)


class _Child:
    """One place among the processes, and whoever fills it now."""

    def __init__(
        self, number: int, command: Sequence[str], pipe: int, backoff: BackoffPolicy
    ) -> None:
        self.number = number
        self.start_at: float | None = None
        """When to start the next process, on the monotonic clock, once one has ended."""
        self._command = command
        self._pipe = pipe
        self._backoff = backoff
        self._crashes = 0
        self._started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Fill the place."""
        self.start_at = None
        self._started_at = monotonic()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, pass_fds=(self._pipe,)
            )
        except OSError as exc:  # no memory or process to spare just now
            self._plan_restart(f"could not be started ({exc})")

    @property
    def pid(self) -> int | None:
        """The process in this place, while it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the latest process ended, as a shell says it; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        return code if code is None or code >= 0 else 128 - code

    def look(self, fatal: Collection[int], renewed: int | None) -> None:
        """Notice the end of the process, and plan the next one."""
        code = self.exit_code
        if code is None or self.start_at is not None:
            return
        if code in fatal:
            log.error("worker process %d %s", self.number, _in_words(code))
        elif code == renewed:
            log.info("worker process %d has done its share; it starts again", self.number)
            self.start_at = monotonic()
        else:
            self._plan_restart(_in_words(code))

    def kill(self) -> None:
        """End the process, if there is one, and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _plan_restart(self, why: str) -> None:
        was_steady = monotonic() - self._started_at >= STEADY_AFTER
        self._crashes = 1 if was_steady else self._crashes + 1
        delay = self._backoff.delay(self._crashes).total_seconds()
        self.start_at = monotonic() + delay
        log.warning("worker process %d %s; it starts again in %.1f s", self.number, why, delay)


def _in_words(exit_code: int) -> str:
    if exit_code > 128:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(exit_code - 128).name}"
    return f"ended with exit code {exit_code}"

"""How a worker process ends: gracefully when told once, at once when told again, and always."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic

from cyclone_sqla.cli.failures import Interrupted
from cyclone_sqla.worker.signals import PARENT_GONE, STOP_SIGNALS, SignalPipe

log = logging.getLogger("cyclone_sqla.worker")


class Stopper:
    """A thread that takes the signals and bounds the stop, whatever the main thread waits for.

    The first signal, or the end of the parent, calls ``stop``. A second signal ends the process,
    and so does the clock: with ``late_code`` if it is still there ``patience`` seconds after the
    first.
    """

    def __init__(
        self, stop: Callable[[], None], *, patience: float, late_code: int, parent: int | None
    ) -> None:
        self._stop = stop
        self._patience = patience
        self._code = late_code
        self._pipe = SignalPipe(STOP_SIGNALS, parent)
        self._told: list[int] = []
        self._ends: float | None = None
        threading.Thread(target=self._watch, name="cyclone-stop", daemon=True).start()

    def expect_end(self, code: int, within: float) -> None:
        """The work is over: leave with this code, also if a thread of an action would not end."""
        self._code = code
        self._ends = monotonic() + within
        self._pipe.nudge()

    def _watch(self) -> None:
        while (left := self._left()) is None or left > 0:
            for told in self._pipe.wait(left):
                self._take(told)
        self._say_last_words()
        os._exit(self._code)

    def _left(self) -> float | None:
        return None if self._ends is None else self._ends - monotonic()

    def _take(self, told: int) -> None:
        if told != PARENT_GONE and any(earlier != PARENT_GONE for earlier in self._told):
            os._exit(Interrupted.exit_code)
        if not self._told:
            self._ends = monotonic() + self._patience
            self._stop()
        self._told.append(told)

    def _say_last_words(self) -> None:
        """In a thread: whoever holds up this process may be writing to the log."""
        text = "something would not end in time; leaving it with exit code %d"
        thread = threading.Thread(target=log.error, args=(text, self._code), daemon=True)
        thread.start()
        thread.join(1.0)

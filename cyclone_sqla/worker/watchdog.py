"""Tells runs that their time is up."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from cyclone_sqla.worker.runs import Interruption, Limit, Run

# Limits that lie closer together than this are found in one look.
_RESOLUTION = 0.002


class Watchdog:
    """One thread that looks after all runs with a limit; it starts with the first of them.

    It looks through the running ones, which are few, instead of keeping a heap: a heap would hold
    finished runs until their limits pass.
    """

    def __init__(self, on_limit: Callable[[Run, Interruption], None]) -> None:
        self._on_limit = on_limit
        self._runs: dict[tuple[int, int], tuple[Run, Limit]] = {}
        self._looks_at = math.inf
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, run: Run, limit: Limit) -> None:
        """Interrupt the run when its limit comes, unless it is forgotten before."""
        self._runs[run.key] = (run, limit)
        if self._thread is None:
            self._start()
        if limit.at < self._looks_at:
            self._wake.put(True)

    def forget(self, run: Run) -> None:
        """The run has ended."""
        self._runs.pop(run.key, None)

    def close(self) -> None:
        """End the thread; it is gone when this returns."""
        self._wake.put(False)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="cyclone-timeouts", daemon=True)
                thread.start()
                self._thread = thread

    def _watch(self) -> None:
        while self._wait(self._look()):
            pass

    def _look(self) -> float | None:
        """Interrupt the runs whose time is up; how many seconds until the next look."""
        # Whoever comes while we look must wake us: we may have passed its place already.
        self._looks_at = math.inf
        now, earliest = monotonic(), math.inf
        for run, limit in self._runs.copy().values():
            if limit.at <= now:
                self.forget(run)
                self._on_limit(run, limit.meaning)
            else:
                earliest = min(earliest, limit.at)
        self._looks_at = earliest
        return None if earliest == math.inf else max(earliest - now, _RESOLUTION)

    def _wait(self, seconds: float | None) -> bool:
        try:
            return self._wake.get(timeout=seconds)
        except Empty:
            return True

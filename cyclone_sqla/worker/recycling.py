"""When a worker process has done its share, so that a fresh one takes its place."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

STATM = Path("/proc/self/statm")


class Share:
    """Counts ended runs, and looks at the memory after each; calls ``on_spent`` once.

    ``max_memory`` is in bytes of resident memory. Without ``/proc`` it is compared with the highest
    that there ever was.
    """

    def __init__(
        self, max_jobs: int | None, max_memory: int | None, on_spent: Callable[[str], None]
    ) -> None:
        self._max_jobs = max_jobs
        self._max_memory = max_memory
        self._on_spent = on_spent
        self._ended = 0
        self._is_spent = False
        self._lock = threading.Lock()

    def note_end(self) -> None:
        """A run has ended: in any thread."""
        if self._max_jobs is None and self._max_memory is None:
            return
        with self._lock:
            self._ended += 1
            why = None if self._is_spent else self._why_spent()
            self._is_spent = self._is_spent or why is not None
        if why is not None:
            self._on_spent(why)

    def _why_spent(self) -> str | None:
        if self._max_jobs is not None and self._ended >= self._max_jobs:
            return f"{self._ended} runs have ended"
        if self._max_memory is not None and (used := resident_memory()) > self._max_memory:
            return f"it uses {used >> 20} MiB of memory"
        return None


def resident_memory() -> int:
    """Bytes of memory that this process occupies."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024

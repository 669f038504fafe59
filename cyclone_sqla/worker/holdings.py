"""What this worker holds: every run from its claim until its end is written."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.operations import HeldRun


class Holdings:
    """The worker's account of its leases and slots.

    A slot is taken at the claim and free again when the run has finished; the lease is held, and
    renewed, until the end is written.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots: Mapping[str, int] = dict(slots)
        """How many runs of each queue may go on at the same time."""
        self._running: Counter[str] = Counter()
        self._runs: set[HeldRun] = set()
        self._lock = threading.Lock()

    def free_slots(self) -> dict[str, int]:
        """How many more jobs each queue may run now; queues without a free slot are left out."""
        with self._lock:
            free = {name: count - self._running[name] for name, count in self.slots.items()}
        return {name: count for name, count in free.items() if count > 0}

    def take(self, jobs: Sequence[ClaimedJob]) -> None:
        """Jobs were claimed."""
        with self._lock:
            self._running.update([job.queue for job in jobs])
            self._runs.update([HeldRun(job.id, job.lease) for job in jobs])

    def finish(self, jobs: Iterable[ClaimedJob]) -> None:
        """Runs have ended: their slots are free, their leases are still held."""
        with self._lock:
            self._running.subtract([job.queue for job in jobs])

    def drop(self, runs: Iterable[tuple[int, int]]) -> None:
        """Leases that are held no more: (job id, lease)."""
        with self._lock:
            self._runs.difference_update(cast("Iterable[HeldRun]", runs))  # equal, and equal hash

    def runs(self) -> set[HeldRun]:
        """Every run whose lease is held."""
        with self._lock:
            return set(self._runs)

"""Starts runs beside the work loop, so that this takes its next turn meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.worker.run_log import say


class Starter:
    """A thread that hands batches to ``start``, in their order; made when the first one comes."""

    def __init__(self, start: Callable[[Sequence[ClaimedJob]], None]) -> None:
        self._start = start
        self._batches: SimpleQueue[Sequence[ClaimedJob] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, jobs: Sequence[ClaimedJob]) -> None:
        """Start these, soon; or before this returns, where the system gives no more threads."""
        if self._thread is None and not self._begin():
            self._start(jobs)
        else:
            self._batches.put(jobs)

    def close(self) -> None:
        """End the thread, after what was put before."""
        self._batches.put(None)

    def _begin(self) -> bool:
        thread = threading.Thread(target=self._serve, name="cyclone-starter", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _serve(self) -> None:
        while (jobs := self._batches.get()) is not None:
            try:
                self._start(jobs)
            except BaseException:  # noqa: BLE001 - the next batch has to be started even so
                text = "a batch of %d job(s) was not started"
                say(logging.CRITICAL, text, len(jobs), exc_info=True)

"""The threads in which sync actions run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from cyclone_sqla.worker.run_log import say
from cyclone_sqla.worker.runs import Run


class ActionThreads:
    """Threads of our own around a SimpleQueue: a tenth of what a ThreadPoolExecutor costs per run.

    They are made when there are more runs than threads, up to ``limit``, and then reused. They are
    daemons, for a thread can't be stopped from outside and must not keep the process alive.
    ``work`` runs an action. ``after`` is called in the same thread when that is over, and may put
    the next run, which then goes on in this thread: to wake another one is what costs.
    """

    def __init__(self, work: Callable[[Run], None], after: Callable[[], None], limit: int) -> None:
        self._work = work
        self._after = after
        self._limit = limit
        self._queue: SimpleQueue[Run | None] = SimpleQueue()
        self._load: set[Run] = set()
        self._threads: list[threading.Thread] = []
        self._own = _Own()

    def put(self, run: Run) -> bool:
        """Start the run in a thread that is free, or a new one; False if there can be no thread.

        One caller at a time. Beyond ``limit`` runs, the next one waits for a thread to be free.
        """
        self._load.add(run)
        if self._own.is_free and self._own.next is None:
            self._own.next = run
            return True
        if len(self._threads) < min(len(self._load), self._limit):
            self._grow()
        if not self._threads:
            self._load.discard(run)
            return False
        self._queue.put(run)
        return True

    def close(self, patience: float) -> None:
        """End the threads, each after its run; wait for each up to ``patience`` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(patience)

    def _grow(self) -> None:
        name = f"cyclone-action-{len(self._threads) + 1}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            text = "no thread could be started beside %d others"
            say(logging.ERROR, text, len(self._threads), exc_info=True)
        else:
            self._threads.append(thread)

    @property
    def is_own(self) -> bool:
        """Whether the calling thread is one of these."""
        return self._own.is_one

    def _serve(self) -> None:
        own = self._own
        own.is_one = True
        while (run := own.next or self._queue.get()) is not None:
            own.next = None
            self._work(run)
            self._load.discard(run)
            del run  # or it would live on here until the next one comes
            own.is_free = True
            self._after()
            own.is_free = False


class _Own(threading.local):
    """What each thread knows of itself."""

    is_one = False
    is_free = False
    """Whether its run is over, so that the next one can go on in it."""

    next: Run | None = None

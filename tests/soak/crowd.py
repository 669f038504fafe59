"""The worker processes of a soak run: each that dies is replaced, as a service manager would."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from tests.crashes.fleet import Fleet, kill
from tests.waiting import wait_until


class Crowd:
    """So many workers, until the end."""

    def __init__(
        self, fleet: Fleet, directory: Path, count: int, chance: random.Random, **settings: Any
    ) -> None:
        self._fleet = fleet
        self._directory = directory
        self._count = count
        self._chance = chance
        self._settings = settings
        self._workers: list[ForkServerProcess] = []
        self._frozen: set[int | None] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._tend, daemon=True)
        self.ended = 0
        """How many processes have ended so far, for whatever reason."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Workers are there during the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join()
            for worker in self._workers:
                kill(worker)

    def victim(self) -> ForkServerProcess:
        """One of those that live."""
        wait_until(lambda: any(w.is_alive() for w in self._workers), "a worker lives", within=60)
        with self._lock:
            return self._chance.choice([w for w in self._workers if w.pid not in self._frozen])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """One of them stands still until the end of the block."""
        process = self._suspended()
        try:
            yield
        finally:
            process.resume()
            self._frozen.discard(process.pid)

    def _suspended(self) -> psutil.Process:
        while True:
            pid = self.victim().pid
            self._frozen.add(pid)
            try:
                process = psutil.Process(pid)
                process.suspend()
            except psutil.NoSuchProcess:
                self._frozen.discard(pid)
                time.sleep(0.01)  # its action has just ended it
            else:
                return process

    def pids(self) -> set[int]:
        """The processes that live."""
        with self._lock:
            return {w.pid for w in self._workers if w.is_alive() and w.pid is not None}

    def idle(self) -> set[int]:
        """Those that live and have run no `probe` yet."""
        return {pid for pid in self.pids() if not (self._directory / f"seen.{pid}").exists()}

    def _tend(self) -> None:
        while not self._ending.wait(0.1):
            with self._lock:
                alive = [w for w in self._workers if w.is_alive()]
                self.ended += len(self._workers) - len(alive)
                self._workers = alive
                missing = self._count - len(alive)
            for _ in range(missing):
                time.sleep(self._chance.uniform(0, 0.5))
                worker = self._fleet.start(**self._settings)
                with self._lock:
                    self._workers.append(worker)

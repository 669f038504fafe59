"""Sequences under SIGKILL: several worker processes, jobs that fail, workers that are shot.

Every run writes its beginning and its end into one file, as it happens; what that file says is
compared with the promise: no two runs of a key overlap, and they begin in enqueue order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyclone_sqla import Cyclone, Job, JobSpec
from tests.databases import Database
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 150.0

SCRIPT = """
import os, random, sys, threading, time
from cyclone_sqla import Context, Cyclone, Discard, Worker

cyclone = Cyclone(os.environ["APP_DATABASE_URL"])
journal = os.open(os.environ["APP_JOURNAL"], os.O_WRONLY | os.O_APPEND)


def tell(event, ctx, key, n):
    line = f"{event} {key} {n} {ctx.attempt} {os.getpid()} {time.monotonic_ns()}\\n"
    os.write(journal, line.encode())


@cyclone.action(backoff=0.01)
def step(ctx: Context, key: str, n: int) -> None:
    tell("begin", ctx, key, n)
    try:
        time.sleep(random.random() * 0.002)
        if n % 17 == 3 and ctx.attempt < 3:
            raise ValueError("it fails sometimes")
        if n % 29 == 7:
            raise Discard("never")
    finally:
        tell("end", ctx, key, n)


with Worker(cyclone, concurrency=8, lease=8, rescue_interval=1) as worker:
    sys.stdin.read()
"""


@dataclass
class Crew:
    """Worker processes on one database, and the journal of their runs."""

    directory: Path
    database: Database

    def __post_init__(self) -> None:
        self.journal = self.directory / "journal"
        self.journal.touch()
        self.script = self.directory / "work.py"
        self.script.write_text(SCRIPT)
        self.killed: dict[int, int] = {}
        self._logs: list[Path] = []
        self._engine = self.database.engine()

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        log = self.directory / f"log-{len(self._logs)}"
        self._logs.append(log)
        environment = {
            **os.environ,
            "APP_DATABASE_URL": self.database.url,
            "APP_JOURNAL": str(self.journal),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(self.script)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Shoot a worker, and remember when it was dead for sure."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.killed[process.pid] = time.monotonic_ns()

    def enqueue(self, keys: int, count: int) -> None:
        """Enqueue `count` jobs of each key, those of one key in order."""
        producer = Cyclone(hints=False)
        specs = [
            JobSpec(kind="step", arguments=f'{{"key":"k{key}","n":{n}}}', sequence=f"k{key}")
            for n in range(count)
            for key in range(keys)
        ]
        with self._engine.begin() as connection:
            producer.enqueue_many(connection, specs)

    def left(self) -> int:
        """How many jobs have not come to their end."""
        count = sa.select(sa.func.count()).select_from(Job).where(~Job.is_terminal)
        with self._engine.connect() as connection:
            return connection.scalar(count) or 0

    def runs_begun(self) -> int:
        return self.journal.read_text().count("begin")

    def check(self, keys: int, count: int) -> None:
        """What the journal and the logs say."""
        lines: dict[str, list[tuple[str, int, int, int]]] = defaultdict(list)
        for line in self.journal.read_text().splitlines():
            event, key, n, _attempt, pid, at = line.split()
            lines[key].append((event, int(n), int(pid), int(at)))
        assert len(lines) == keys
        for key, events in lines.items():
            self._check_line(key, sorted(events, key=lambda event: event[3]), count)
        for log in self._logs:
            text = log.read_text()
            assert "constraint" not in text, text
            assert "duplicate key" not in text, text

    def _check_line(self, key: str, events: list[tuple[str, int, int, int]], count: int) -> None:
        running: tuple[int, int] | None = None
        begun: list[int] = []
        for event, n, pid, at in events:
            if event == "end":
                assert running == (n, pid), f"{key}: {n} ended while {running} ran"
                running = None
                continue
            if running is not None:  # it can only have died
                assert running[1] in self.killed, f"{key}: {n} began while {running} ran"
                assert at > self.killed[running[1]]
            running = (n, pid)
            if n not in begun:
                begun.append(n)
        assert begun == list(range(count)), key


@pytest.fixture
def crew(tmp_path: Path, postgresql_database: Database) -> Crew:
    """Workers on PostgreSQL, none of them started."""
    return Crew(tmp_path, postgresql_database)


def test_one_key_runs_in_order_whoever_is_killed(crew: Crew) -> None:
    crew.enqueue(1, 300)
    with ExitStack() as stack:
        workers = [stack.enter_context(crew.worker()) for _ in range(3)]
        wait_until(lambda: crew.runs_begun() > 40, "some runs", within=PATIENCE)
        crew.kill(workers[0])
        wait_until(lambda: crew.left() == 0, "every job ended", within=PATIENCE, every=0.1)
    crew.check(1, 300)


def test_many_keys_run_in_order_each_while_workers_are_killed(crew: Crew) -> None:
    crew.enqueue(30, 40)
    with ExitStack() as stack:
        workers = [stack.enter_context(crew.worker()) for _ in range(3)]
        for number, threshold in enumerate((100, 400)):
            wait_until(lambda t=threshold: crew.runs_begun() > t, "runs", within=PATIENCE)
            crew.kill(workers[number])
            workers.append(stack.enter_context(crew.worker()))
        wait_until(lambda: crew.left() == 0, "every job ended", within=PATIENCE, every=0.1)
    crew.check(30, 40)

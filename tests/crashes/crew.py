"""A crowd of workers in several processes on the sequences of one database, and what it did.

Every run writes its beginning and its end into one file, as it happens. What that file says is
compared with the promise: no two runs of a key overlap, they begin in enqueue order, and a replayed
job comes again in its place. A monitor looks at the invariant all the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from cyclone_sqla import Cyclone, Job, JobSpec
from tests.databases import Database

PROCESSES = 3
WORKERS_OF_A_PROCESS = 4

SCRIPT = f"""
import os, random, sys, time
from contextlib import ExitStack
from cyclone_sqla import Context, Cyclone, Discard, Worker

cyclone = Cyclone(os.environ["APP_DATABASE_URL"])
journal = os.open(os.environ["APP_JOURNAL"], os.O_WRONLY | os.O_APPEND)


def tell(event, key, n, again):
    line = f"{{event}} {{key}} {{n}} {{int(again)}} {{os.getpid()}} {{time.monotonic_ns()}}\\n"
    os.write(journal, line.encode())


@cyclone.action(backoff=0.01)
def step(ctx: Context, key: str, n: int, again: bool = False) -> None:
    tell("begin", key, n, again)
    try:
        time.sleep(random.random() * 0.002)
        if random.random() < 0.05 or (n % 17 == 3 and ctx.attempt < 3):
            raise ValueError("it fails sometimes")
        if n % 29 == 7 and not again:
            raise Discard("only a person can help")
    finally:
        tell("end", key, n, again)


with ExitStack() as workers:
    for _ in range({WORKERS_OF_A_PROCESS}):
        worker = Worker(cyclone, concurrency=4, lease=6, rescue_interval=1)
        workers.enter_context(worker)
    sys.stdin.read()
"""

BROKEN = sa.text("""
SELECT sequence_key, count(admitted), count(*) FILTER (WHERE waits_for = 'turn'),
    count(*) FILTER (WHERE state = 'running')
FROM cyclone_job WHERE sequence_key IS NOT NULL GROUP BY sequence_key
HAVING count(admitted) > 1
    OR (count(admitted) = 0 AND count(*) FILTER (WHERE waits_for = 'turn') > 0)
    OR count(*) FILTER (WHERE state = 'running') > 1
    OR count(*) FILTER (WHERE state IN ('running', 'available') AND admitted IS NULL) > 0
""")
"""Keys in a state that no transaction may leave: two heads, none though jobs wait for their turn,
two runs, or a run of a job that is no head.
"""


class Told(NamedTuple):
    """A line of the journal."""

    event: str
    key: str
    n: int
    again: bool
    pid: int
    at: int


class Replayed(NamedTuple):
    """A dead letter was replayed, and that was committed before this moment."""

    key: str
    n: int
    at: int


@dataclass
class Crew:
    """Worker processes on one database, and the journal of their runs."""

    directory: Path
    database: Database
    server_log: Path | None = None
    """Of a server of our own, which tells what a worker may have kept to itself."""

    def __post_init__(self) -> None:
        self.journal = self.directory / "journal"
        self.journal.touch()
        self.script = self.directory / "work.py"
        self.script.write_text(SCRIPT)
        self.killed: dict[int, int] = {}
        self.replayed: list[Replayed] = []
        self._logs: list[Path] = []
        self._was_logged = 0
        self._was_logged = len(self._server_log())
        self._engine = self.database.engine()
        self._producer = Cyclone(hints=False)
        self._person = Cyclone(self._engine)

    # ---- workers -----------------------------------------------------------------------------

    @contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        """Several workers in one process, until the end of the block."""
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
        """Shoot a process, and remember when it was dead for sure."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.killed[process.pid] = time.monotonic_ns()

    # ---- the application and a person --------------------------------------------------------

    def enqueue(self, keys: int, numbers: range) -> None:
        """Enqueue the jobs of these numbers for each key, in order."""
        specs = [
            JobSpec(kind="step", arguments=f'{{"key":"k{key}","n":{n}}}', sequence=f"k{key}")
            for n in numbers
            for key in range(keys)
        ]
        with self._engine.begin() as connection:
            self._producer.enqueue_many(connection, specs)

    def replay_dead_letters(self) -> int:
        """Replay each, in a transaction of its own; how many there were."""
        letters = sa.select(Job.id, Job.arguments).where(Job.dead_letter.is_not(None))
        with self._engine.connect() as connection:
            dead = connection.execute(letters).all()
        for job_id, arguments in dead:
            told = json.loads(arguments)
            with self._engine.begin() as connection:
                self._person.replay(connection, job_id, arguments={**told, "again": True})
            self.replayed.append(Replayed(told["key"], told["n"], time.monotonic_ns()))
        return len(dead)

    def runs_begun(self) -> int:
        """How many runs have begun."""
        return self.journal.read_text().count("begin")

    def is_done(self) -> bool:
        """Whether every job has been completed, dead letters replayed."""
        count = sa.select(sa.func.count()).select_from(Job).where(Job.state != "completed")
        with self._engine.connect() as connection:
            return self.replay_dead_letters() == 0 and connection.scalar(count) == 0

    # ---- what it comes to --------------------------------------------------------------------

    def check(self, keys: int, count: int) -> None:
        """What the journal, the table and the logs say."""
        lines: dict[str, list[Told]] = defaultdict(list)
        for text in self.journal.read_text().splitlines():
            event, key, n, again, pid, at = text.split()
            lines[key].append(Told(event, key, int(n), again == "1", int(pid), int(at)))
        assert len(lines) == keys
        for events in lines.values():
            events.sort(key=lambda told: told.at)
            self._check_no_overlap(events)
            begun = [told.n for told in events if told.event == "begin"]
            assert list(dict.fromkeys(begun)) == list(range(count)), events[0].key
        for replayed in self.replayed:
            _check_place(replayed, lines[replayed.key])
        self._check_table()
        assert self.replayed, "nothing was replayed"
        for text in (*(log.read_text() for log in self._logs), self._server_log()):
            for word in ("constraint", "duplicate key", "deadlock", "lost its head"):
                assert word not in text, text

    def _server_log(self) -> str:
        text = "" if self.server_log is None else self.server_log.read_text(errors="replace")
        return text[self._was_logged :]

    def _check_no_overlap(self, events: list[Told]) -> None:
        running: Told | None = None
        for told in events:
            if told.event == "end":
                assert running is not None, f"{told} ended, and had not begun"
                assert (running.n, running.pid) == (told.n, told.pid), f"{told} ended in {running}"
                running = None
                continue
            if running is not None:  # it can only have died
                assert running.pid in self.killed, f"{told} began while {running} ran"
                assert told.at > self.killed[running.pid]
            running = told

    def _check_table(self) -> None:
        left = sa.select(Job.id, Job.state).where(
            sa.or_(Job.sequence_open.is_not(None), Job.admitted.is_not(None))
        )
        with self._engine.connect() as connection:
            assert connection.execute(left).all() == []


def _check_place(replayed: Replayed, events: list[Told]) -> None:
    """It runs again after one job of a later place at most: the one whose turn had come before."""
    after = [told for told in events if told.at > replayed.at and told.event == "begin"]
    again = next((i for i, told in enumerate(after) if told.n == replayed.n), None)
    if again is None:  # it had begun before this process noted the commit
        assert [told for told in events if told.n == replayed.n and told.again], replayed
        return
    later = {told.n for told in after[:again] if told.n > replayed.n}
    assert len(later) <= 1, f"{sorted(later)} began between the replay {replayed} and its run"


class Monitor:
    """Looks for broken keys again and again, from a thread and a connection of its own."""

    def __init__(self, database: Database) -> None:
        self.looks = 0
        self.broken: list[tuple[object, ...]] = []
        self._engine = database.engine(isolation_level="AUTOCOMMIT")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the block runs; nothing may have been broken at any moment."""
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join()
        assert self.broken == []
        assert self.looks > 20

    def _watch(self) -> None:
        with self._engine.connect() as connection:
            while not self._ending.wait(0.03):
                self.broken += [tuple(row) for row in connection.execute(BROKEN)]
                self.looks += 1

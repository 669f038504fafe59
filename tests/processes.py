"""`cyclone-sqla work` as real processes, on an application that is written for one test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Job
from cyclone_sqla.models import HistoryEntry, WorkerRecord
from tests.databases import Database
from tests.waiting import wait_until

PATIENCE = 60.0
"""Seconds for a process to do what it does in one, on a machine that is busy with others."""

eventually = partial(wait_until, within=PATIENCE)
"""Wait until a process has done something."""

APP = '''
"""An application whose actions tell, and ask, by files in its own directory."""

import asyncio, atexit, os, sys, threading, time
from pathlib import Path

from cyclone_sqla import Context, Cyclone

HERE = Path(__file__).parent

cyclone = Cyclone(os.environ["APP_DATABASE_URL"])

(HERE / f"{os.getpid()}.imported").touch()


@atexit.register
def tell_what_was_loaded():
    (HERE / "modules").write_text("\\n".join(sys.modules))


def may_go(name):
    return (HERE / f"{name}.go").exists()


def tell(ctx, name):
    (HERE / f"{name}.{ctx.attempt}").touch()


@cyclone.action
def hold(ctx: Context, name: str) -> None:
    tell(ctx, name)
    while not may_go(name):
        time.sleep(0.01)


@cyclone.action
async def hold_async(ctx: Context, name: str) -> None:
    tell(ctx, name)
    while not may_go(name):
        await asyncio.sleep(0.01)


@cyclone.action
async def block_the_loop(ctx: Context, name: str) -> None:
    hold.fn(ctx, name)


@cyclone.action
def leave_a_thread(ctx: Context, name: str) -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    tell(ctx, name)


@cyclone.action
def say(ctx: Context, text: str) -> None:
    ctx.log.warning(text)


kept = []


@cyclone.action
def keep_memory(ctx: Context, mebibytes: int) -> None:
    kept.append(b"x" * (mebibytes << 20))


@cyclone.action
def fail(ctx: Context, text: str) -> None:
    raise ValueError(text)
'''


class App:
    """The application in a directory of its own, and the jobs in its database."""

    def __init__(self, directory: Path, database: Database) -> None:
        self.directory = directory
        self.database = database
        self._engine = database.engine()
        self._producer = Cyclone(hints=False)
        self._runs = 0
        (directory / "jobs.py").write_text(APP)

    @contextmanager
    def work(self, *options: str, **environment: str) -> Iterator["Process"]:
        """A process of `cyclone-sqla work`, started; nothing of it is left after the block."""
        command = [sys.executable, "-m", "cyclone_sqla", "work", "--app", "jobs:cyclone", *options]
        with self.run(*command, **environment) as process:
            yield process

    @contextmanager
    def run(self, *command: str, **environment: str) -> Iterator["Process"]:
        """Any process that works on the application, in a session of its own."""
        self._runs += 1
        output = self.directory / f"output-{self._runs}"
        with output.open("w") as file:
            popen = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, "APP_DATABASE_URL": self.database.url, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(popen, output)
        try:
            yield process
        finally:
            process.clear_away()

    # ---- the jobs ----------------------------------------------------------------------------

    def enqueue(
        self, kind: str, queue: str = "default", max_attempts: int = 25, **arguments: Any
    ) -> int:
        """Enqueue a job, as a producer that hasn't the application's code; its id."""
        with self._engine.begin() as connection:
            ref = self._producer.enqueue(
                connection, kind, arguments, queue=queue, max_attempts=max_attempts
            )
        return ref.id

    def enqueue_in(self, schema: str, kind: str, **arguments: Any) -> int:
        """The same where the queue's tables are in this schema."""
        producer = Cyclone(schema=schema, hints=False)
        with self._engine.begin() as connection:
            return producer.enqueue(connection, kind, arguments).id

    def job(self, job_id: int) -> Job:
        """The job as it is now."""
        with self._engine.connect() as connection:
            return self._producer.get(connection, job_id)

    def history(self, job_id: int) -> list[str]:
        """What happened to a job, the oldest first."""
        entries = sa.select(HistoryEntry.event).where(HistoryEntry.job_id == job_id)
        with Session(self._engine) as session:
            return list(session.scalars(entries.order_by(HistoryEntry.id)))

    def workers(self) -> dict[str, int]:
        """The workers that have a record: the process of each, by its name."""
        with Session(self._engine) as session:
            records = session.scalars(sa.select(WorkerRecord).order_by(WorkerRecord.started_at))
            return {record.name: record.pid for record in records}

    # ---- the actions -------------------------------------------------------------------------

    def wait_begun(self, name: str, attempt: int = 1) -> None:
        """Wait until an attempt of the held job `name` runs."""
        began = self.directory / f"{name}.{attempt}"
        eventually(began.exists, f"attempt {attempt} of {name} runs")

    def let_go(self, name: str) -> None:
        """Let the held job `name` return."""
        (self.directory / f"{name}.go").touch()

    def loaded(self) -> set[str]:
        """The packages that a process had loaded when it ended."""
        modules = (self.directory / "modules").read_text().split()
        return {name.split(".")[0] for name in modules}

    def importers(self) -> set[int]:
        """The processes that have loaded the application."""
        return {int(path.stem) for path in self.directory.glob("*.imported")}


class Process:
    """One process and what it wrote."""

    def __init__(self, popen: "subprocess.Popen[bytes]", output: Path) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._output = output

    def lines(self) -> list[str]:
        """What it wrote so far."""
        return self._output.read_text(errors="backslashreplace").splitlines()

    def records(self) -> list[dict[str, Any]]:
        """The same as the JSON objects that every line must be."""
        return [json.loads(line) for line in self._output.read_text().split("\n") if line]

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until it has written `count` lines with `text`."""
        eventually(
            lambda: sum(text in line for line in self.lines()) >= count or self._fail_if_over(text),
            f"{text!r} in the output",
        )

    def _fail_if_over(self, text: str) -> bool:
        assert self._popen.poll() is None or any(text in line for line in self.lines()), (
            f"it ended ({self._popen.returncode}) and wrote: {self.lines()}"
        )
        return False

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to it and to every process that it started, as service managers do."""
        os.killpg(self.pid, number)

    def exit_code(self) -> int:
        """Wait for its end."""
        return self._popen.wait(PATIENCE)

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self.send(signal.SIGTERM)
        return self.exit_code()

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.pid).children()

    def clear_away(self) -> None:
        """Kill it and all that it started."""
        for process in _of_session(self.pid):
            process.kill()
        self._popen.wait()


def _of_session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                found.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return found

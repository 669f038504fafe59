"""Worker processes that are killed and started again, on one database."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.crashes.victims import work
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Site

PATIENCE = 60.0
"""Seconds for what takes one or two, on a machine that is busy with others."""

LONGEST_DRAIN = 240.0

LOG_ON_POSTGRESQL = """
CREATE FUNCTION log_completion() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO completion VALUES (new.id); RETURN new; END $$;
CREATE TRIGGER log_completion AFTER UPDATE ON cyclone_job FOR EACH ROW
WHEN (new.state = 'completed') EXECUTE FUNCTION log_completion()
"""

LOG_ON_SQLITE = """
CREATE TRIGGER log_completion AFTER UPDATE ON cyclone_job WHEN new.state = 'completed'
BEGIN INSERT INTO completion VALUES (new.id); END
"""

# A server that has imported everything forks them: they are at work after some milliseconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.crashes.victims", "psycopg", "sqlite3"])


class Fleet:
    """Workers on one database, each a process of its own."""

    def __init__(
        self,
        directory: Path,
        database: Database,
        work: Callable[[str, Path, Path, dict[str, Any]], None] = work,
        *,
        url: str | None = None,
    ) -> None:
        """`work` is what each process does, given the database's URL, `directory`, the file for its
        output, and the worker's settings. `url` is another way to the database, for them alone.
        """
        self.site = Site(database, hints=False)
        self._url = url or database.url
        self._work = work
        self._directory = directory
        self._outputs: list[Path] = []

    @contextmanager
    def worker(self, **settings: Any) -> Iterator[ForkServerProcess]:
        """A worker that is killed at the end of the block."""
        process = self.start(**settings)
        try:
            yield process
        finally:
            kill(process)

    def start(self, **settings: Any) -> ForkServerProcess:
        """A worker, which the caller has to end."""
        output = self._directory / f"output-{len(self._outputs)}"
        output.touch()
        self._outputs.append(output)
        process = _processes.Process(
            target=self._work, args=(self._url, self._directory, output, settings), daemon=True
        )
        process.start()
        return process

    def drain_under_fire(self, workers: int, every: float, **settings: Any) -> int:
        """Keep so many workers running until every job is completed; the number of kills.

        Whenever the time has come, one that is in the middle of a job is killed, and another
        started; not at the end, when that would be the same job each time.
        """
        running = [self.start(**settings) for _ in range(workers)]
        kills, began = 0, time.monotonic()
        next_kill = began + every
        try:
            while set(left := self.site.states()) != {"completed"}:
                if time.monotonic() > began + LONGEST_DRAIN:
                    raise TimeoutError(f"after {kills} kills there are {self.site.states()}")
                time.sleep(0.05)
                is_time = left["available"] and time.monotonic() > next_kill
                if is_time and self._kill_a_busy_one(running):
                    running.append(self.start(**settings))
                    kills += 1
                    next_kill = time.monotonic() + every
        finally:
            for process in running:
                kill(process)
        return kills

    def _kill_a_busy_one(self, running: list[ForkServerProcess]) -> bool:
        busy = self._busy()
        victims = [process for process in running if process.pid in busy]
        if not victims:
            return False
        victim = random.choice(victims)
        kill(victim)
        running.remove(victim)
        return True

    def _busy(self) -> set[int]:
        """The processes that run a job at this moment."""
        running = (
            "SELECT DISTINCT pid FROM cyclone_worker JOIN cyclone_job "
            "ON cyclone_job.worker = cyclone_worker.id WHERE state = 'running'"
        )
        with self.site.engine.connect() as connection:
            return set(connection.scalars(sa.text(running)))

    # ---- the jobs ----------------------------------------------------------------------------

    def enqueue_brief(self, count: int) -> list[int]:
        """Enqueue many jobs that take 20 ms each; their ids."""
        return self.site.enqueue_many(count, "brief")

    def log_completions(self) -> None:
        """Let the database itself keep a log of every completion."""
        self.site.execute("CREATE TABLE completion (job_id bigint NOT NULL)")
        is_sqlite = self.site.database.dialect == "sqlite"
        self.site.execute(LOG_ON_SQLITE if is_sqlite else LOG_ON_POSTGRESQL)

    def completions(self) -> list[int]:
        """That log, by id."""
        with self.site.engine.connect() as connection:
            ids = connection.scalars(sa.text("SELECT job_id FROM completion ORDER BY job_id"))
            return list(ids)

    def wait_begun(self, action: str, attempt: int = 1) -> None:
        """Return once this attempt of the action runs."""
        wait_until(
            lambda: self.has_begun(action, attempt),
            f"attempt {attempt} of {action} runs",
            within=PATIENCE,
        )

    def has_begun(self, action: str, attempt: int) -> bool:
        """Whether this attempt has ever run."""
        return (self._directory / f"{action}.{attempt}").exists()

    def let_go(self, attempt: int) -> None:
        """Let this attempt of `hold` return."""
        (self._directory / f"hold.{attempt}.go").touch()

    def output(self) -> str:
        """What all of them wrote, those that were killed included."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)


def kill(process: ForkServerProcess) -> None:
    """Kill it as no handler can see, and wait until it is gone."""
    process.kill()
    process.join()

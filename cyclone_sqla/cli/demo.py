"""`cyclone-sqla demo`: the main job, from the transaction to the ledger, and what must be true.

The shop is `demo_shop` and its customers `demo_traffic`; `demo_place` is where it happens, and
`demo_checks` compares the outcome with what was done.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import click
import sqlalchemy as sa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from sqlalchemy.orm import Session

from cyclone_sqla import migrations
from cyclone_sqla.cli import demo_shop
from cyclone_sqla.cli.demo_checks import Check, checks
from cyclone_sqla.cli.demo_place import NAMES, Interrupts, Place, Workers, make_place
from cyclone_sqla.cli.demo_traffic import Books, open_shop, take_orders
from cyclone_sqla.cli.failures import Failed, database_failures
from cyclone_sqla.lifecycle import State
from cyclone_sqla.urls import parsed

PATIENCE = 60.0
"""Seconds without a job ending after which the demo waits no longer and says what is missing."""

LOOK_EVERY = 0.1
"""Seconds between two looks at how far the jobs are."""

KILL_FROM = 100
"""With so many jobs or more, a worker is killed when a third of them are over."""

EPILOG = """\b
Exit codes:
    0  every check holds
    1  a check failed, or the database could not be reached, or refused
    2  an option is wrong
  130  interrupted
"""


@click.command("demo", epilog=EPILOG)
@click.option(
    "--database-url",
    metavar="URL",
    help="PostgreSQL, where it makes a schema of its own, or a SQLite file that is not there yet. "
    "Without it: SQLite in a temporary file.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 100_000),
    default=1_000,
    show_default=True,
    metavar="N",
    help="How many to enqueue and commit; some more are rolled back.",
)
@click.option("--keep", is_flag=True, help="Leave what it makes, to be looked at.")
def command(database_url: str | None, jobs: int, keep: bool) -> None:
    """See it work: orders and their jobs commit together, and two workers run the jobs, those of an
    account one after the other. In the middle of it one of them is killed (with 100 jobs or more).

    At the end it checks that nothing is missing, nothing happened twice or out of turn, and nothing
    is left of what was rolled back. It touches only what it makes, and removes that.
    """
    console = Console(highlight=False)
    url = parsed(database_url) if database_url is not None else None
    with (
        Interrupts() as interrupts,
        make_place(url, interrupts, keep=keep) as place,
        database_failures(place.url),
    ):
        found = _play(place, jobs, interrupts, console)
    _report(found, console)
    if keep:
        _say(console, f"Kept: {place}; logs: {place.directory}\n")
    _judge(found)
    _say_what_next(console)


def _play(place: Place, jobs: int, interrupts: Interrupts, console: Console) -> Sequence[Check]:
    """The whole story; what was found at its end."""
    _say(console, f"cyclone-sqla demo, on {place}\n", style="bold")
    _prepare(place, console)
    books = Books()
    try:
        with Workers(place, interrupts) as workers, Gauge(console, jobs) as gauge:
            crash = Crash(workers, jobs)
            for committed in take_orders(jobs, books):
                gauge.show(committed, over := _jobs_over())
                crash.come(over)
                if _must_end(workers, interrupts):
                    break
            _wait(jobs, workers, interrupts, gauge, crash)
            lost = workers.ended()
        _tell(books, crash, console)
        with Session(demo_shop.engine()) as session:
            return [*checks(session, books), _workers_stayed(lost)]
    finally:
        demo_shop.engine().dispose()


def _prepare(place: Place, console: Console) -> None:
    os.environ.update(place.environment)  # the workers' processes inherit it
    demo_shop.cyclone.use_schema(place.schema)
    migrations.migrate_database(place.url, schema=place.schema)
    open_shop()
    _say(console, "migrate  The queue's tables stand beside the shop's own, in one database.")
    _say(console, "enqueue  Each order and the job that charges it are written in one transaction.")
    _say(console, "work     Two worker processes run the jobs, those of an account in order.\n")


def _wait(jobs: int, workers: Workers, interrupts: Interrupts, gauge: Gauge, crash: Crash) -> None:
    """Until every job is over, or there is no hope for it."""
    over, changed_at = -1, monotonic()
    while over < jobs and monotonic() - changed_at < PATIENCE:
        if _must_end(workers, interrupts):
            return
        sleep(LOOK_EVERY)
        before, over = over, _jobs_over()
        crash.come(over)
        if over != before:
            changed_at = monotonic()
            gauge.show(jobs, over)


def _must_end(workers: Workers, interrupts: Interrupts) -> bool:
    """Whether a worker is gone. What ends the workers ends the demo, and is asked for first."""
    interrupts.check()
    return bool(workers.ended())


def _jobs_over() -> int:
    job = demo_shop.cyclone.job_class
    how_many = sa.select(sa.func.count()).select_from(job).where(job.is_terminal)
    with Session(demo_shop.engine()) as session:
        return session.scalar(how_many) or 0


class Crash:
    """The end of a worker in the middle of its jobs."""

    def __init__(self, workers: Workers, jobs: int) -> None:
        self._workers = workers
        self._due = jobs // 3 if jobs >= KILL_FROM else jobs + 1
        self.had_running = 0
        """Jobs that the killed worker was at; 0 before."""

    def come(self, over: int) -> None:
        """Kill a worker if it is time, and it has begun what it has not ended."""
        if over < self._due or self.had_running:
            return
        self.had_running = _jobs_of(NAMES[0])
        if self.had_running:
            self._workers.kill(NAMES[0])


def _jobs_of(worker: str) -> int:
    job = demo_shop.cyclone.job_class
    running = sa.select(sa.func.count()).where(
        job.state == State.RUNNING, job.worker.startswith(f"{worker}/")
    )
    with Session(demo_shop.engine()) as session:
        return session.scalar(running) or 0


def _workers_stayed(lost: Sequence[str]) -> Check:
    return Check("every other worker stayed to the end", f"{2 - len(lost)} of 2", "; ".join(lost))


# ---- on the screen -------------------------------------------------------------------------------


class Gauge:
    """How far the jobs are: bars on a terminal, a line for each quarter elsewhere."""

    def __init__(self, console: Console, jobs: int) -> None:
        self._console = console
        self._jobs = jobs
        self._quarters = 0
        self._bars = Progress(
            TextColumn("  {task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._enqueued = self._bars.add_task("enqueued", total=jobs)
        self._over = self._bars.add_task("run", total=jobs)

    def show(self, enqueued: int, over: int) -> None:
        """So many are committed, and so many have ended."""
        self._bars.update(self._enqueued, completed=enqueued)
        self._bars.update(self._over, completed=over)
        quarters = over * 4 // self._jobs
        if quarters > self._quarters and not self._console.is_terminal:
            self._quarters = quarters
            _say(self._console, f"  {over:,} of {self._jobs:,} jobs have run")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()


def _tell(books: Books, crash: Crash, console: Console) -> None:
    killed = ""
    if crash.had_running:
        killed = (
            f"Killed: one worker, in the middle of {crash.had_running} jobs, which ran again.\n"
        )
    _say(
        console,
        f"\nCommitted: {len(books.committed):,} orders, in {books.commits:,} transactions.\n"
        f"Rolled back: {len(books.rolled_back):,} orders, with {books.rollbacks:,} transactions "
        f"and {books.savepoints:,} savepoints.\n{killed}",
    )


def _report(found: Sequence[Check], console: Console) -> None:
    width = max(len(check.name) for check in found)
    for check in found:
        line = Text.assemble(("FAILED", "red") if check.trouble else ("ok    ", "green"))
        line.append(f"  {check.name:<{width}}  {check.trouble or check.found}")
        console.print(line, soft_wrap=True)
    console.print()


def _judge(found: Sequence[Check]) -> None:
    failed = [check for check in found if check.trouble]
    if failed:
        names = "; ".join(f"{check.name} ({check.trouble})" for check in failed)
        raise Failed(f"the demo failed: {names}")


def _say_what_next(console: Console) -> None:
    _say(
        console,
        "A job runs again when its worker dies. What the shop's action writes goes through the\n"
        "session of its run, which commits together with the job's completion: it happens once.\n\n"
        "Read the shop, an application like yours:\n"
        f"  {demo_shop.__file__}\n"
        "Then try the quickstart in README.md or the tutorial in docs/, or in your application:\n"
        "  cyclone-sqla migrate --app yourmodule:cyclone\n"
        "  cyclone-sqla work --app yourmodule:cyclone",
    )


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)

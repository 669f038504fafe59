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
from cyclone_sqla.cli.demo_place import Interrupts, Place, Workers, make_place
from cyclone_sqla.cli.demo_traffic import Books, open_shop, take_orders
from cyclone_sqla.cli.failures import Failed, database_failures
from cyclone_sqla.urls import parsed

PATIENCE = 60.0
"""Seconds without a job ending after which the demo waits no longer and says what is missing."""

LOOK_EVERY = 0.1
"""Seconds between two looks at how far the jobs are."""

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
    """See it work: orders and their jobs commit together, and two workers run the jobs.

    At the end it checks that nothing is missing, nothing happened twice, and nothing is left of
    what was rolled back. It touches only what it makes, and removes that.
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
            for committed in take_orders(jobs, books):
                gauge.show(committed, _jobs_over())
                if _must_end(workers, interrupts):
                    break
            _wait(jobs, workers, interrupts, gauge)
            lost = workers.ended()
        _tell(books, console)
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
    _say(console, "work     Two worker processes claim the jobs and run them.\n")


def _wait(jobs: int, workers: Workers, interrupts: Interrupts, gauge: Gauge) -> None:
    """Until every job is over, or there is no hope for it."""
    over, changed_at = -1, monotonic()
    while over < jobs and monotonic() - changed_at < PATIENCE:
        if _must_end(workers, interrupts):
            return
        sleep(LOOK_EVERY)
        before, over = over, _jobs_over()
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


def _workers_stayed(lost: Sequence[str]) -> Check:
    return Check("both workers stayed to the end", f"{2 - len(lost)} of 2", "; ".join(lost))


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


def _tell(books: Books, console: Console) -> None:
    _say(
        console,
        f"\nCommitted: {len(books.committed):,} orders, in {books.commits:,} transactions.\n"
        f"Rolled back: {len(books.rolled_back):,} orders, with {books.rollbacks:,} transactions "
        f"and {books.savepoints:,} savepoints.\n",
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
        "Delivery is at least once: had a worker died, its jobs would have run again. The shop's\n"
        "action finds that an order is charged already, and then leaves everything as it is.\n\n"
        "Read the shop, an application like yours:\n"
        f"  {demo_shop.__file__}\n"
        "Then try the quickstart in README.md or the tutorial in docs/, or in your application:\n"
        "  cyclone-sqla migrate --app yourmodule:cyclone\n"
        "  cyclone-sqla work --app yourmodule:cyclone",
    )


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)

"""`python -m tests.soak --minutes 10`: faults at random, then a table."""

import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import click

from cyclone_sqla.migrations import migrate_database
from tests.databases import Database
from tests.servers.postgres import PostgresServer
from tests.servers.silent import SilentProxy
from tests.soak.arena import Arena, Outcome, PostgresArena
from tests.soak.report import as_json, is_clean, table

Run = Callable[[Path, str, float], Outcome]


def on_postgresql(directory: Path, seed: str, seconds: float) -> Outcome:
    """On a server of its own."""
    with PostgresServer({"deadlock_timeout": "100ms"}) as server:
        server.create_database("soak")
        migrate_database(server.url("soak"))
        url = server.url("soak")
        with closing(Database(url)) as database, SilentProxy(url) as proxy:
            return PostgresArena(server, database, proxy, directory, seed).fight(seconds)


def on_sqlite(directory: Path, seed: str, seconds: float) -> Outcome:
    """On a file."""
    url = f"sqlite:///{directory / 'soak.db'}"
    migrate_database(url)
    with closing(Database(url)) as database:
        return Arena(database, directory, seed).fight(seconds)


RUNS: dict[str, Run] = {"postgresql": on_postgresql, "sqlite": on_sqlite}


@click.command()
@click.option("--minutes", type=float, required=True, help="How long faults happen.")
@click.option("--seed", help="Of an earlier run, to have the same faults in the same order.")
@click.option("--database", type=click.Choice(sorted(RUNS)), help="This one alone.")
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write as well.")
@click.option("--logs", type=click.Path(path_type=Path), help="A new directory to keep the logs.")
def main(
    minutes: float, seed: str | None, database: str | None, out: Path | None, logs: Path | None
) -> None:
    """Faults at random against both databases at the same time; fails unless the zeros are zero."""
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # it tells of every lost connection
    seed = seed or str(random.randrange(1_000_000))
    click.echo(f"--seed {seed}")
    with tempfile.TemporaryDirectory(prefix="cyclone-soak-") as scratch:
        outcomes = run(
            [database] if database else sorted(RUNS), logs or Path(scratch), seed, minutes
        )
    for outcome in outcomes:
        click.echo(f"\n{table(outcome)}")
    if out is not None:
        out.write_text(json.dumps([as_json(outcome) for outcome in outcomes], indent=1))
    sys.exit(not all(map(is_clean, outcomes)))


def run(databases: list[str], directory: Path, seed: str, minutes: float) -> list[Outcome]:
    """All of them at the same time, each in a directory of its own."""
    for name in databases:
        (directory / name).mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(RUNS[n], directory / n, seed, minutes * 60) for n in databases]
        return [future.result() for future in begun]


if __name__ == "__main__":
    main()

"""`cyclone-sqla doctor`: what is wrong with a queue, and what to do.

==== ==========================================================================================
code meaning
==== ==========================================================================================
0    nothing is wrong; there may be notes
1    there are errors or warnings
2    it could not look: the database can't be reached, or an option or the application is wrong
130  interrupted
==== ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

import click
from sqlalchemy import Engine

from cyclone_sqla.cli.access import Access, connected, reading
from cyclone_sqla.cli.failures import Failed, WrongUse, database_failures
from cyclone_sqla.cli.machine import print_json
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.cli.texts import shown
from cyclone_sqla.doctor import Finding, examine, examine_engine, examine_tables, mend

PROBLEMS = 1

EPILOG = """\b
Exit codes:
    0  nothing is wrong; there may be notes
    1  there are errors or warnings
    2  it could not look: the database can't be reached, or an option is wrong
  130  interrupted
"""


@click.command("doctor", epilog=EPILOG)
@takes_target
@click.option(
    "--fix",
    is_flag=True,
    help="Do first what any worker does by itself: take back jobs whose lease ran out long ago, "
    "give sequences that lost it their head, hand on their places. It says what it did.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
)
@click.pass_context
def command(
    ctx: click.Context, /, target: Target, *, fix: bool, form: Literal["text", "json"]
) -> None:
    """Look for what keeps jobs from running, or soon will.

    It looks at the connection, the tables and their indexes, the server, and jobs and sequences
    that nobody moves. Without --fix it writes nothing.
    """
    with _or_blind(), database_failures(target.url):
        done, found = _look(target, fix=fix)
    if form == "json":
        print_json({"done": done, "findings": found})
    else:
        _print(done, found)
    ctx.exit(PROBLEMS if any(finding.is_problem for finding in found) else 0)


@contextmanager
def _or_blind() -> Generator[None]:
    """A script can tell what could not be looked at from what is wrong."""
    try:
        yield
    except Failed as exc:
        raise WrongUse(exc.message) from exc


def _look(target: Target, *, fix: bool) -> tuple[list[str], list[Finding]]:
    """What was done, and what is found after that."""
    with reading(target) as connection:
        wrong_tables = examine_tables(connection, target.schema, target.url)
    if wrong_tables is not None:
        return [], [wrong_tables]
    with connected(target) as access:
        done = mend(target.database, access.cyclone) if fix else []
        return done, _examined(target, access)


def _examined(target: Target, access: Access) -> list[Finding]:
    with access.engine.connect() as connection:
        found = examine(connection, access.cyclone)
        if isinstance(target.database, Engine):
            found += examine_engine(target.database, connection, access.cyclone)
    return found


def _print(done: Sequence[str], found: Sequence[Finding]) -> None:
    from cyclone_sqla.cli.tables import print_line

    for sentence in done:
        print_line(f"done     {shown(sentence)}")
    for finding in found:
        print_line(f"{finding.severity:<8} {finding.name}: {shown(finding.text)}")
        print_line(f"         {shown(finding.advice)}")
    if not found:
        print_line("Nothing is wrong.")

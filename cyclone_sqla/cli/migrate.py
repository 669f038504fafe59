"""`cyclone-sqla migrate`: create, upgrade, check or remove the queue's tables."""

from __future__ import annotations

from datetime import timedelta

import click

from cyclone_sqla.cli.failures import EXIT_CODES, database_failures
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.errors import SchemaError
from cyclone_sqla.schema_version import complaint, upgrade_command

HEAD = "head"


@click.command("migrate", epilog=EXIT_CODES)
@takes_target
@click.option("--revision", metavar="R", help="Upgrade to this revision, not the newest.")
@click.option("--downgrade", metavar="R", help="Go back to this revision; base removes all jobs.")
@click.option("--sql", is_flag=True, help="Print the SQL, connect to nothing. R may be FROM:TO.")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if an upgrade is needed.")
@click.option(
    "--lock-timeout",
    type=click.IntRange(0, 86_400),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another migration, and for each table in use.",
)
def command(
    target: Target,
    revision: str | None,
    downgrade: str | None,
    sql: bool,
    check: bool,
    lock_timeout: int,
) -> None:
    """Create or upgrade the queue's tables.

    Any number of processes may run this at the same time: one works, the others wait for it.
    """
    _refuse_together("--revision", revision, "--downgrade", downgrade)
    _refuse_together("--check", check, "--sql", sql)
    _refuse_together("--check", check, "--revision or --downgrade", revision or downgrade)
    with database_failures(target.url):
        if sql:
            _print_script(target, revision, downgrade)
        elif check:
            _check(target)
        else:
            _migrate(target, revision, downgrade, timedelta(seconds=lock_timeout))


def _migrate(
    target: Target, revision: str | None, downgrade: str | None, lock_timeout: timedelta
) -> None:
    from cyclone_sqla import migrations

    with migrations.own_transaction(target.database, lock_timeout) as connection:
        if downgrade is not None:
            steps = migrations.downgrade(
                connection, schema=target.schema, revision=downgrade, lock_timeout=lock_timeout
            )
        else:
            steps = migrations.upgrade(
                connection,
                schema=target.schema,
                revision=revision or HEAD,
                lock_timeout=lock_timeout,
            )
        reached = migrations.current(connection, target.schema)
    for step in steps:
        click.echo(f"{step.id}  {step.title}" + ("  (undone)" if downgrade is not None else ""))
    place = f"is at revision {reached}" if reached else "has no tables of cyclone-sqla"
    click.echo(f"{target} {place}" + ("" if steps else ": nothing to do"))


def _check(target: Target) -> None:
    from cyclone_sqla import migrations

    status = migrations.check_database(target.database, schema=target.schema)
    if status.pending:
        behind = ", ".join(f"{step.id} ({step.title})" for step in status.pending)
        command = upgrade_command(status.installed, target.url, target.schema)
        raise SchemaError(f"{target} is behind, it lacks {behind}; run: {command}")
    if not status.is_current:
        raise SchemaError(complaint(status.installed, target.url, target.schema))
    click.echo(f"{target} is at revision {status.current}, the newest")


def _print_script(target: Target, revision: str | None, downgrade: str | None) -> None:
    from cyclone_sqla import migrations

    dialect = migrations.script_dialect(target.url)
    if downgrade is not None:
        start, end = _range(downgrade, HEAD)
        script = migrations.downgrade_script(dialect, end, schema=target.schema, start=start)
    else:
        start, end = _range(revision or HEAD, migrations.BASE)
        script = migrations.upgrade_script(dialect, end, schema=target.schema, start=start)
    click.echo(script, nl=False)


def _range(revision: str, start: str) -> tuple[str, str]:
    """FROM and TO of ``FROM:TO``; where FROM is left out, ``start``."""
    first, _, last = revision.rpartition(":")
    return first or start, last


def _refuse_together(one: str, is_one: object, other: str, is_other: object) -> None:
    if is_one and is_other:
        raise click.UsageError(f"{one} and {other} don't go together")

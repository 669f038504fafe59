"""`cyclone-sqla queues`: what stands in them, who serves them, and their pauses."""

from __future__ import annotations

from collections.abc import Sequence

import click

from cyclone_sqla.cli.access import access_to, acts
from cyclone_sqla.cli.failures import EXIT_CODES
from cyclone_sqla.cli.machine import print_json
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.cli.texts import brief, paused_by, short, shown
from cyclone_sqla.figures import QueueFigures
from cyclone_sqla.lifecycle import State


@click.group("queues")
def command() -> None:
    """Look at queues, pause and resume them."""


@command.command("list", epilog=EXIT_CODES)
@takes_target
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def list_queues(target: Target, /, as_json: bool) -> None:
    """List every queue that has jobs, is paused, or is served by a live worker.

    Counts end at 10,000 or a little more. OLDEST is since when the first of the available jobs
    could have run, SLOTS how many jobs the live workers run at the same time.
    """
    with access_to(target) as access, access.transaction() as connection:
        queues = access.cyclone.queues(connection)
    if as_json:
        print_json({"queues": queues})
    elif queues:
        _print_queues(queues)
    else:
        click.echo("no queues")


def _print_queues(queues: Sequence[QueueFigures]) -> None:
    from cyclone_sqla.cli.tables import Column, print_table

    columns = (
        Column("QUEUE", gives=True),
        *(Column(str(name).upper(), justify="right") for name in _SHOWN),
        Column("OLDEST (UTC)"),
        Column("SLOTS", justify="right"),
        Column("NOTE", gives=True),
    )
    print_table(columns, (_row(queue) for queue in queues))


_SHOWN = (State.PENDING, State.AVAILABLE, State.RUNNING, State.PAUSED)


def _row(queue: QueueFigures) -> tuple[object, ...]:
    counts = (brief(queue.jobs[state]) for state in _SHOWN)
    paused = None if queue.paused_at is None else paused_by(queue.paused_by)
    return queue.name, *counts, short(queue.waits_since), queue.slots, paused


@command.command("pause", epilog=EXIT_CODES)
@takes_target
@click.argument("name")
@acts
def pause(target: Target, /, name: str, by: str) -> None:
    """Keep workers from claiming from a queue. Jobs that run go on, and enqueue works."""
    with access_to(target) as access, access.transaction() as connection:
        access.cyclone.pause_queue(connection, name, by=by)
    click.echo(shown(f"queue {name} is paused"))


@command.command("resume", epilog=EXIT_CODES)
@takes_target
@click.argument("name")
def resume(target: Target, /, name: str) -> None:
    """Have workers claim from a queue again."""
    with access_to(target) as access, access.transaction() as connection:
        was_paused = access.cyclone.resume_queue(connection, name)
    end = "is resumed" if was_paused else "was not paused"
    click.echo(shown(f"queue {name} {end}"))

"""`cyclone-sqla stats`: a database at a glance."""

from __future__ import annotations

from collections.abc import Iterator

import click

from cyclone_sqla.cli.access import access_to
from cyclone_sqla.cli.failures import EXIT_CODES
from cyclone_sqla.cli.machine import print_json
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.cli.texts import short
from cyclone_sqla.figures import Stats, WorkerFigures
from cyclone_sqla.lifecycle import State


@click.command("stats", epilog=EXIT_CODES)
@takes_target
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(target: Target, /, as_json: bool) -> None:
    """Show how many jobs are in which state, what stands, and who works.

    Counts end at 10,000 or a little more.
    """
    with access_to(target) as access, access.transaction() as connection:
        stats = access.cyclone.stats(connection)
    if as_json:
        print_json(stats)
        return
    from cyclone_sqla.cli.tables import print_pairs

    print_pairs(_pairs(stats))
    if stats.workers:
        click.echo()
        _print_workers(stats.workers)


def _pairs(stats: Stats) -> Iterator[tuple[str, object]]:
    for state in State:
        yield state, str(stats.jobs[state]) + (_pending(stats) if state == State.PENDING else "")
    yield "dead letters", stats.dead_letters
    yield "halted sequences", stats.halted_sequences
    yield "paused queues", ", ".join(stats.paused_queues) or "none"
    yield "oldest available", stats.waits_since
    alive = sum(worker.is_alive for worker in stats.workers)
    yield "live workers", alive


def _pending(stats: Stats) -> str:
    """What the pending jobs wait for, as far as there are any."""
    parts = [f"{waits_for} {count}" for waits_for, count in stats.pending.items() if count.number]
    return f" ({', '.join(parts)})" if parts else ""


def _print_workers(workers: tuple[WorkerFigures, ...]) -> None:
    from cyclone_sqla.cli.tables import Column, print_table

    columns = (
        Column("WORKER", gives=True),
        Column("STATE"),
        Column("SEEN (UTC)"),
        Column("QUEUES", gives=True),
        Column("KINDS", gives=True),
    )
    print_table(columns, (_row(worker) for worker in workers))


def _row(worker: WorkerFigures) -> tuple[object, ...]:
    queues = ",".join(f"{queue}:{slots}" for queue, slots in worker.queues.items())
    state = "alive" if worker.is_alive else "silent"
    return worker.name, state, short(worker.seen_at), queues, ",".join(worker.kinds)

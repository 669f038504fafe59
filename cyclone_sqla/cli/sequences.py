"""`cyclone-sqla sequences`: who is at the head, who waits, what stands, and pauses."""

from __future__ import annotations

from collections.abc import Sequence

import click

from cyclone_sqla.cli.access import access_to, acts
from cyclone_sqla.cli.failures import EXIT_CODES
from cyclone_sqla.cli.machine import print_json
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.cli.texts import brief, in_state, paused_by, short, shown
from cyclone_sqla.figures import HaltedSequence, SequenceFigures


@click.group("sequences")
def command() -> None:
    """Look at sequences, pause and resume them."""


@command.command("list", epilog=EXIT_CODES)
@takes_target
@click.option("--halted", is_flag=True, help="Only those that stand until a person acts.")
@click.option("--paused", is_flag=True, help="Only those that are paused.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="N")
@click.option("--after", metavar="KEY", help="Go on after this key (of --halted: this head's id).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def list_sequences(
    target: Target,
    /,
    halted: bool,
    paused: bool,
    limit: int,
    after: str | None,
    as_json: bool,
) -> None:
    """List the sequences that have jobs in line.

    Who waits is counted up to 1,000.
    """
    if halted and paused:
        raise click.UsageError("--halted and --paused don't go together")
    if halted:
        _list_halted(target, limit, _head_id(after), as_json)
        return
    with access_to(target) as access, access.transaction() as connection:
        found = access.cyclone.sequences(
            connection, limit=limit, after=after or "", only_paused=paused
        )
    following = found[-1].key if len(found) == limit else None
    if as_json:
        print_json({"sequences": found, "after": following})
        return
    _print_sequences(found)
    _tell_following(following)


def _head_id(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit()):
        raise click.UsageError("--after: with --halted it is the id of a head")
    return int(after)


def _list_halted(target: Target, limit: int, after: int, as_json: bool) -> None:
    with access_to(target) as access, access.transaction() as connection:
        found = access.cyclone.halted_sequences(connection, limit=limit, after=after)
    following = found[-1].head if len(found) == limit else None
    if as_json:
        print_json({"sequences": found, "after": following})
        return
    _print_halted(found)
    _tell_following(following)


def _tell_following(following: object) -> None:
    if following is not None:
        click.echo(shown(f"There may be more: --after {following}"), err=True)


def _print_sequences(found: Sequence[SequenceFigures]) -> None:
    from cyclone_sqla.cli.tables import Column, print_table

    if not found:
        click.echo("no sequences")
        return
    columns = (
        Column("SEQUENCE", gives=True),
        Column("HEAD", justify="right"),
        Column("KIND", gives=True),
        Column("STATE"),
        Column("SINCE (UTC)"),
        Column("WAITING", justify="right"),
        Column("NOTE", gives=True),
    )
    print_table(columns, (_row(line) for line in found))


def _row(line: SequenceFigures) -> tuple[object, ...]:
    head, notes = line.head, list[str]()
    if line.is_halted:
        notes.append("halted")
    if line.paused_at is not None:
        notes.append(paused_by(line.paused_by))
    if head is None:
        return line.key, None, None, None, None, brief(line.waiting), ", ".join(notes)
    place = (line.key, head.id, head.kind, in_state(head.state, head.waits_for), short(head.since))
    return *place, brief(line.waiting), ", ".join(notes)


def _print_halted(found: Sequence[HaltedSequence]) -> None:
    from cyclone_sqla.cli.tables import Column, print_table

    if not found:
        click.echo("no sequence is halted")
        return
    columns = (
        Column("SEQUENCE", gives=True),
        Column("HEAD", justify="right"),
        Column("KIND", gives=True),
        Column("SINCE (UTC)"),
        Column("WAITING", justify="right"),
        Column("WHY", gives=True),
    )
    rows = ((h.key, h.head, h.kind, short(h.since), brief(h.waiting), h.why) for h in found)
    print_table(columns, rows)


@command.command("show", epilog=EXIT_CODES)
@takes_target
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(target: Target, /, key: str, as_json: bool) -> None:
    """Show a sequence: its head, why that isn't running, and who waits."""
    with access_to(target) as access, access.transaction() as connection:
        line = access.cyclone.sequence(connection, key)
        head = line.head
        why = None if head is None else access.cyclone.explain(connection, head.id)
    if as_json:
        print_json({"sequence": line, "explanation": why})
        return
    from cyclone_sqla.cli.tables import print_pairs, print_paragraph

    state = "halted" if line.is_halted else "paused" if line.paused_at else None
    print_pairs(
        (
            ("sequence", line.key),
            ("state", state),
            ("paused since", line.paused_at),
            ("paused by", line.paused_by),
            ("head", None if head is None else f"job {head.id} ({head.kind})"),
            ("waiting", line.waiting.of_jobs()),
            ("released through position", line.released_through),
        )
    )
    if why is not None:
        click.echo()
        print_paragraph(why.text)


@command.command("pause", epilog=EXIT_CODES)
@takes_target
@click.argument("key")
@acts
def pause(target: Target, /, key: str, by: str) -> None:
    """Start no job of a sequence until it is resumed. One that runs goes on."""
    with access_to(target) as access, access.transaction() as connection:
        access.cyclone.pause_sequence(connection, key, by=by)
    click.echo(shown(f"sequence {key} is paused"))


@command.command("resume", epilog=EXIT_CODES)
@takes_target
@click.argument("key")
def resume(target: Target, /, key: str) -> None:
    """Let a sequence go on."""
    with access_to(target) as access, access.transaction() as connection:
        was_paused = access.cyclone.resume_sequence(connection, key)
    end = "is resumed" if was_paused else "was not paused"
    click.echo(shown(f"sequence {key} {end}"))

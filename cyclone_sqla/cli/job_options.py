"""The options that say which jobs are meant, and how a verb goes about many of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from cyclone_sqla.cli.access import acts
from cyclone_sqla.cli.options import takes_target
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.job_spec import MAX_ID
from cyclone_sqla.lifecycle import State

Command = TypeVar("Command", bound=Callable[..., Any])

JOB_ID = click.IntRange(1, MAX_ID)


def past(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """A time, or how long ago it was."""
    return _moment(ctx, param, value, direction=-1)


def future(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """A time, or how long it is until then."""
    return _moment(ctx, param, value, direction=1)


def _moment(
    ctx: click.Context, param: click.Parameter, value: str | None, direction: int
) -> datetime | None:
    if value is None:
        return None
    duration = parse_duration(value)
    if duration is not None:
        return datetime.now(UTC) + direction * duration
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        time = None
    if time is None or time.utcoffset() is None:
        raise click.BadParameter(
            f"{value!r} is no time: give one with its offset, like 2030-01-31T12:00:00Z, or a "
            "duration, like 90s, 10m, 2h or 7d",
            ctx,
            param,
        )
    return time


def delay(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    """How long from now."""
    duration = None if value is None else parse_duration(value)
    if value is not None and duration is None:
        raise click.BadParameter(f"{value!r} is no duration, like 90s, 10m, 2h or 7d", ctx, param)
    return duration


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_duration(text: str) -> timedelta | None:
    """The duration that a text like 90s, 10m, 2h or 7d means; None if it means none."""
    found = re.fullmatch(r"(\d{1,5})([smhd])", text)
    return None if found is None else timedelta(**{_UNITS[found[2]]: int(found[1])})


_FILTER_OPTIONS = (
    click.option("--state", type=click.Choice([str(state) for state in State])),
    click.option("--queue", metavar="NAME"),
    click.option("--kind", metavar="KIND"),
    click.option("--sequence", metavar="KEY"),
    click.option("--tenant", metavar="NAME"),
    click.option(
        "--created-before", callback=past, metavar="TIME", help="ISO 8601, or an age like 2h."
    ),
    click.option(
        "--created-after", callback=past, metavar="TIME", help="ISO 8601, or an age like 2h."
    ),
    click.option("--dead-letter", is_flag=True, help="Only dead letters that nobody dealt with."),
)


def filter_options(command: Command) -> Command:
    """Give a command the options of a filter, for :func:`filter_of`."""
    for option in reversed(_FILTER_OPTIONS):
        command = option(command)
    return command


def filter_of(options: dict[str, Any]) -> JobFilter:
    """The filter that the options mean; takes them out of ``options``."""
    names = ("state", "queue", "kind", "sequence", "tenant", "created_before", "created_after")
    given = {name: options.pop(name) for name in names}
    return JobFilter(**given, dead_letter=options.pop("dead_letter") or None)


def acts_on_jobs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command what every verb on jobs takes."""
    options = (
        click.argument("ids", type=JOB_ID, nargs=-1, metavar="[ID]..."),
        filter_options,
        acts,
        click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done."),
        click.option("--yes", is_flag=True, help="Don't ask, whatever the filter means."),
        click.option(
            "--batch",
            type=click.IntRange(1, 10_000),
            default=100,
            show_default=True,
            metavar="N",
            help="Jobs of one transaction, where a filter says which.",
        ),
        click.option("--quiet", "-q", is_flag=True, help="Only the sums, not every job."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document."),
    )
    for option in reversed(options):
        command = option(command)
    return takes_target(command)

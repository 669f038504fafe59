"""`cyclone-sqla jobs`: what jobs there are, why they wait, and what people do to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from cyclone_sqla.cli.access import access_to
from cyclone_sqla.cli.failures import EXIT_CODES
from cyclone_sqla.cli.job_options import JOB_ID, filter_of, filter_options
from cyclone_sqla.cli.job_verbs import VERBS
from cyclone_sqla.cli.machine import loaded, print_json
from cyclone_sqla.cli.options import Target, takes_target
from cyclone_sqla.cli.texts import in_state, short
from cyclone_sqla.explanations import Explanation
from cyclone_sqla.figures import JobEvent
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.models import Job


@click.group("jobs")
def command() -> None:
    """Look at jobs, and act on them."""


for _verb in VERBS:
    command.add_command(_verb)

# ---- list ----------------------------------------------------------------------------------------


@command.command("list", epilog=EXIT_CODES)
@takes_target
@filter_options
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="N")
@click.option("--after", type=JOB_ID, metavar="ID", help="Go on after this job.")
@click.option("--oldest-first", is_flag=True, help="From the first to the last.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def list_jobs(
    target: Target,
    /,
    limit: int,
    after: int | None,
    oldest_first: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """List jobs, the newest first."""
    wanted = filter_of(options)
    with access_to(target) as access, access.transaction() as connection:
        jobs = access.cyclone.jobs(
            connection, wanted, limit=limit, after=after, newest_first=not oldest_first
        )
    following = jobs[-1].id if len(jobs) == limit else None
    if as_json:
        print_json({"jobs": jobs, "after": following})
        return
    print_jobs(jobs)
    if following is not None:
        click.echo(f"There may be more: --after {following}", err=True)


def print_jobs(jobs: Sequence[Job]) -> None:
    """A table of jobs; those of no line are said to be none."""
    from cyclone_sqla.cli.tables import Column, print_table

    if not jobs:
        click.echo("no jobs")
        return
    columns = (
        Column("ID", justify="right"),
        Column("KIND", gives=True),
        Column("QUEUE", gives=True),
        Column("STATE"),
        Column("TRY", justify="right"),
        Column("CREATED (UTC)"),
        Column("NOTE", gives=True),
    )
    print_table(columns, (_row(job) for job in jobs))


def _row(job: Job) -> tuple[object, ...]:
    state = in_state(job.state, job.waits_for)
    tries = job.attempt - job.snoozes
    notes = "; ".join(_notes(job))
    return job.id, job.kind, job.queue, state, tries, short(job.created_at), notes


def _notes(job: Job) -> Iterator[str]:
    """What is worth knowing of a job in this state, in a few words."""
    if job.dead_letter:
        yield "dead letter"
    if job.waits_for in (WaitsFor.TIME, WaitsFor.RETRY):
        yield f"due {short(job.run_at)}"
    if job.state == State.RUNNING:
        yield f"by {job.worker}"
    if job.sequence_key is not None:
        yield f"in {job.sequence_key}"
    if job.last_error is not None and job.state != State.COMPLETED:
        yield job.last_error


# ---- show ----------------------------------------------------------------------------------------


@command.command("show", epilog=EXIT_CODES)
@takes_target
@click.argument("job_id", type=JOB_ID, metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(target: Target, /, job_id: int, as_json: bool) -> None:
    """Show all that is known of a job: its fields, why it waits, its history."""
    with access_to(target) as access, access.transaction() as connection:
        job = access.cyclone.get(connection, job_id)
        explanation = access.cyclone.explain(connection, job_id)
        history = access.cyclone.history(connection, job_id)
    if as_json:
        print_json({"job": job, "explanation": explanation, "history": history})
    else:
        _print_job(job, explanation, history)


def _print_job(job: Job, explanation: Explanation, history: Sequence[JobEvent]) -> None:
    from cyclone_sqla.cli.tables import print_pairs, print_paragraph

    print_paragraph(explanation.text)
    click.echo()
    print_pairs((name, getattr(job, name)) for name in _FIELDS)
    for name in ("arguments", "result"):
        _print_document(name, getattr(job, name))
    if history:
        click.echo()
        _print_history(history)


_FIELDS = (
    "id", "kind", "queue", "priority", "state", "waits_for", "created_at", "run_at", "started_at",
    "failed_at", "finished_at", "deadline", "timeout", "attempt", "max_attempts", "snoozes",
    "crashes", "worker", "lease", "leased_until", "cancel_requested_at", "unique_key",
    "sequence_key", "position", "on_failure", "dead_letter", "last_error", "tenant", "trace_id",
    "origin", "headers",
)  # fmt: skip


def _print_document(name: str, text: str | None) -> None:
    from cyclone_sqla.cli.tables import print_lines

    if text is not None:
        click.echo(f"\n{name}")
        document = json.dumps(loaded(text), indent=2, ensure_ascii=False)
        print_lines(f"  {line}" for line in document.splitlines())


def _print_history(history: Sequence[JobEvent]) -> None:
    from cyclone_sqla.cli.tables import Column, print_table

    columns = (
        Column("HISTORY (UTC)"),
        Column("EVENT"),
        Column("TRY", justify="right"),
        Column("WHO", gives=True),
        Column("ERROR", gives=True),
    )
    print_table(
        columns, ((e.at, e.event, e.attempt, e.actor or e.worker, e.error) for e in history)
    )


# ---- explain -------------------------------------------------------------------------------------


@command.command("explain", epilog=EXIT_CODES)
@takes_target
@click.argument("job_id", type=JOB_ID, metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def explain(target: Target, /, job_id: int, as_json: bool) -> None:
    """Say why a job isn't running."""
    with access_to(target) as access, access.transaction() as connection:
        explanation = access.cyclone.explain(connection, job_id)
    if as_json:
        print_json(explanation)
        return
    from cyclone_sqla.cli.tables import print_paragraph

    print_paragraph(explanation.text)

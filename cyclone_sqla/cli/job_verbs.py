"""`cyclone-sqla jobs cancel|pause|resume|replay|skip|reschedule`: by ids, or all of a filter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

import click

from cyclone_sqla.bulk import BulkReport, Refused
from cyclone_sqla.cli.access import Access, access_to, require_app
from cyclone_sqla.cli.failures import EXIT_CODES, FAILED
from cyclone_sqla.cli.job_options import acts_on_jobs, delay, filter_of, future
from cyclone_sqla.cli.machine import print_json
from cyclone_sqla.cli.options import Target
from cyclone_sqla.cli.texts import shown
from cyclone_sqla.errors import DuplicateError, InvalidTransitionError, JobNotFoundError
from cyclone_sqla.interventions import PARTICIPLES
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.lifecycle import State

# ---- what is done --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a person asks for: a verb with its options, and how to go about it."""

    verb: str
    by: str
    options: Mapping[str, Any]
    dry_run: bool
    yes: bool
    batch: int
    quiet: bool
    as_json: bool

    @property
    def participle(self) -> str:
        """ "cancelled"; of a dry run "would be cancelled"."""
        return ("would be " if self.dry_run else "") + PARTICIPLES[self.verb]


@dataclass
class Tally:
    """What became of all jobs, told as it goes on unless it is told as one document."""

    order: Order
    done: list[int] = field(default_factory=list[int])
    asked: list[int] = field(default_factory=list[int])
    refused: list[Refused] = field(default_factory=list[Refused])

    def add(self, done: Iterable[JobRef], refused: Iterable[Refused]) -> None:
        """Note, and tell, what became of some."""
        for ref in done:
            is_asked = self.order.verb == "cancel" and ref.state == State.RUNNING
            (self.asked if is_asked else self.done).append(ref.id)
            self._tell(f"job {ref.id} ({ref.kind}): {self._told(ref, is_asked)}")
        for refusal in refused:
            self.refused.append(refusal)
            self._tell(f"job {refusal.job_id}: refused: {refusal.why}")

    def _told(self, ref: JobRef, is_asked: bool) -> str:
        if is_asked:
            return f"runs, {'would be' if self.order.dry_run else 'was'} asked to stop"
        participle = self.order.participle
        now = "" if self.order.dry_run or ref.state == participle else f", now {ref.state}"
        return participle + now

    def _tell(self, line: str) -> None:
        if not (self.order.quiet or self.order.as_json):
            click.echo(shown(line))

    def close(self) -> None:
        """Tell the sums, and end the process accordingly."""
        if self.order.as_json:
            print_json(
                {
                    "verb": self.order.verb,
                    "dry_run": self.order.dry_run,
                    "done": self.done,
                    "asked_to_stop": self.asked,
                    "refused": self.refused,
                }
            )
        else:
            asked = f", {len(self.asked):,} asked to stop" if self.asked else ""
            refused = f", {len(self.refused):,} refused" if self.refused else ""
            click.echo(f"{len(self.done):,} {self.order.participle}{asked}{refused}")
        if self.refused:
            click.get_current_context().exit(FAILED)


def carry_out(
    target: Target, verb: str, ids: Sequence[int], options: dict[str, Any], **of_verb: Any
) -> None:
    """Do a verb to the named jobs, or to all that the filter means."""
    wanted = filter_of(options)
    if bool(ids) != wanted.is_empty:
        raise click.UsageError(
            f"which jobs? give ids, like `cyclone-sqla jobs {verb} 4711`, or a filter, like "
            "--queue mail; not both"
        )
    order = Order(verb, options=of_verb, **options)
    tally = Tally(order)
    with access_to(target) as access:
        if ids:
            _act_on_each(access, order, ids, tally)
        else:
            Errand(access, order, wanted).run(tally)
    tally.close()


def _act_on_each(access: Access, order: Order, ids: Iterable[int], tally: Tally) -> None:
    """Each job in a transaction of its own; of a dry run the transaction is not committed."""
    for job_id in ids:
        try:
            with access.engine.connect() as connection:
                act = getattr(access.cyclone, order.verb)
                ref = cast("JobRef", act(connection, job_id, by=order.by, **order.options))
                if not order.dry_run:
                    connection.commit()
        except (InvalidTransitionError, DuplicateError, JobNotFoundError) as exc:
            tally.add((), [Refused(job_id=job_id, why=str(exc))])
        else:
            tally.add([ref], ())


ASKED_OF = 1_000
"""How many jobs are counted before a person is asked."""


@dataclass(frozen=True)
class Errand:
    """An order about all jobs that a filter means."""

    access: Access
    order: Order
    wanted: JobFilter

    def run(self, tally: Tally) -> None:
        """Ask, then batch after batch, each committed before it is told."""
        if not (self.order.yes or self.order.dry_run):
            self._ask()
        after: int | None = 0
        while after is not None:
            report = self._batch(after, self.order.batch, preview=self.order.dry_run)
            tally.add(report.done, report.refused)
            after = report.after

    def _ask(self) -> None:
        look = self._batch(0, ASKED_OF, preview=True)
        more = " or more" if look.after is not None else ""
        refused = f" ({len(look.refused):,}{more} will be refused)" if look.refused else ""
        jobs = "job" if len(look.done) == 1 and not more else "jobs"
        question = f"{self.order.verb} {len(look.done):,}{more} {jobs}{refused}?"
        click.confirm(question, abort=True, err=True)

    def _batch(self, after: int, limit: int, *, preview: bool) -> BulkReport:
        act = getattr(self.access.cyclone, f"{self.order.verb}_many")
        options = {**self.order.options, "by": self.order.by, "preview": preview}
        with self.access.transaction() as connection:
            report = act(connection, self.wanted, after=after, limit=limit, **options)
        return cast("BulkReport", report)


# ---- the commands --------------------------------------------------------------------------------


@click.command("cancel", epilog=EXIT_CODES)
@acts_on_jobs
def cancel(target: Target, /, ids: Sequence[int], **options: Any) -> None:
    """End waiting jobs, and ask running ones to stop.

    A running job ends as cancelled, whatever it does. Name jobs by ids, or all by a filter.
    """
    carry_out(target, "cancel", ids, options)


@click.command("pause", epilog=EXIT_CODES)
@acts_on_jobs
def pause(target: Target, /, ids: Sequence[int], **options: Any) -> None:
    """Keep waiting jobs from running; they keep their place."""
    carry_out(target, "pause", ids, options)


@click.command("resume", epilog=EXIT_CODES)
@acts_on_jobs
def resume(target: Target, /, ids: Sequence[int], **options: Any) -> None:
    """Let paused jobs go on."""
    carry_out(target, "resume", ids, options)


@click.command("replay", epilog=EXIT_CODES)
@click.option(
    "--arguments",
    metavar="JSON",
    help="New arguments, of one job; checked against its action, so --app is needed.",
)
@acts_on_jobs
def replay(target: Target, /, ids: Sequence[int], arguments: str | None, **options: Any) -> None:
    """Have failed and cancelled jobs begin afresh, in their old places."""
    if arguments is None:
        carry_out(target, "replay", ids, options)
        return
    if len(ids) != 1:
        raise click.UsageError("--arguments are for one job: give its id")
    require_app(target, "new arguments are checked against the job's action")
    carry_out(target, "replay", ids, options, arguments=_object(arguments))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise click.UsageError(f"--arguments: not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise click.UsageError('--arguments: a JSON object is needed, like {"to": "a@example.org"}')
    return cast("dict[str, Any]", value)


@click.command("skip", epilog=EXIT_CODES)
@acts_on_jobs
def skip(target: Target, /, ids: Sequence[int], **options: Any) -> None:
    """Pass over heads that halt their sequences, and mark dead letters as dealt with."""
    carry_out(target, "skip", ids, options)


@click.command("reschedule", epilog=EXIT_CODES)
@click.option("--in", "process_in", callback=delay, metavar="DURATION", help="From now: 90s, 2h.")
@click.option("--at", "process_at", callback=future, metavar="TIME", help="ISO 8601, with offset.")
@acts_on_jobs
def reschedule(
    target: Target,
    /,
    ids: Sequence[int],
    process_in: timedelta | None,
    process_at: datetime | None,
    **options: Any,
) -> None:
    """Give waiting jobs another time."""
    if (process_in is None) == (process_at is None):
        raise click.UsageError("when? give one of --in and --at")
    carry_out(target, "reschedule", ids, options, process_in=process_in, process_at=process_at)


VERBS = (cancel, pause, resume, replay, skip, reschedule)

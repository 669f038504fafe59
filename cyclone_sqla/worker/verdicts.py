"""From what an action raised to the outcome of its run, and to the end of its transaction."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import NamedTuple, cast

from cyclone_sqla.backoff import DEFAULT_BACKOFF, MAX_DELAY
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.errors import LeaseLostError
from cyclone_sqla.failures import Failure
from cyclone_sqla.outcomes import (
    Cancelled,
    CancelledOutcome,
    Discard,
    Discarded,
    Outcome,
    Retried,
    Retry,
    Snooze,
    Snoozed,
)
from cyclone_sqla.worker.runs import Interruption, Run, Runnable, Unit, Written


class End(NamedTuple):
    """The end of a run: see :class:`~cyclone_sqla.worker.runs.Finished`."""

    outcome: Outcome
    written: Written | None = None
    is_doubtful: bool = False


def conclude(run: Run, outcome: Outcome, error: BaseException | None) -> End | None:
    """Commit what the action did through its session, together with the outcome, or roll it back.

    None if the action has to start over. Never raises.
    """
    unit = run.unit
    if unit is None or not unit.is_open:
        return End(outcome)
    if error is not None and not keeps_writes(error):
        return _undo(run, unit, outcome, error)
    try:
        return End(outcome, unit.commit(outcome))
    except BaseException as exc:  # noqa: BLE001 - whatever a database or a flush raises
        return _undo(run, unit, outcome_of(run, exc), exc)


def _undo(run: Run, unit: Unit, outcome: Outcome, error: BaseException) -> End | None:
    is_doubtful = unit.is_ending
    if run.interruption is None and unit.starts_over(error):
        return None
    unit.roll_back()
    return End(outcome, is_doubtful=is_doubtful)


def outcome_of(run: Run, exc: BaseException) -> Outcome:
    """How a run ends whose action raised, SystemExit and the like included. Never raises."""
    try:
        return _judge(run, exc)
    except BaseException as trouble:  # noqa: BLE001 - say a subclass of Retry without its delay
        note = f"what it asks for can't be told: {Failure.of(trouble).error}"
        return _failed_attempt(run.job, exc, DEFAULT_BACKOFF.delay(counted(run.job)), note)


def keeps_writes(exc: BaseException) -> bool:
    """Whether the action asked that what it wrote through its session stays."""
    raised = _sole(exc)
    return isinstance(raised, Snooze | Discard) and raised.keep_writes


def counted(job: ClaimedJob) -> int:
    """Which of ``max_attempts`` this run is: snoozed runs are not counted."""
    return max(1, job.attempt - job.snoozes)


def _judge(run: Run, exc: BaseException) -> Outcome:
    raised = _sole(exc)
    if run.interruption is Interruption.EXPIRED:
        return Discarded(Failure.because(run.interruption, "Expired", cause=exc))
    if run.interruption is not None and isinstance(raised, Cancelled | asyncio.CancelledError):
        return _interrupted(run, run.interruption, exc)
    if isinstance(raised, Snooze):
        return Snoozed(min(raised.in_, MAX_DELAY), Failure.of(exc))
    if isinstance(raised, Discard):
        return Discarded(Failure.of(exc))
    if isinstance(raised, Retry):
        delay = raised.in_ if raised.in_ is not None else _backoff(run)
        return _failed_attempt(run.job, exc, delay)
    return _failed(run, exc)


def _interrupted(run: Run, why: Interruption, exc: BaseException) -> Outcome:
    """The run did what it was asked to: it stopped. An unasked CancelledError doesn't come here."""
    if why is Interruption.CANCELLED:
        return CancelledOutcome(Failure.because(why, "Cancelled", cause=exc))
    if why is Interruption.STOPPING:
        # Not the job's fault, so no backoff; it counts, for its code has run.
        return _failed_attempt(run.job, _because(Cancelled(why), exc), timedelta(0))
    if why is Interruption.TIMED_OUT:
        return _failed(run, _because(TimeoutError(f"{why}{_after(run.timeout)}"), exc))
    return _failed(run, _because(LeaseLostError(why), exc))


def _after(timeout: timedelta | None) -> str:
    return f" after {timeout.total_seconds():g} s" if timeout is not None else ""


def _failed(run: Run, exc: BaseException) -> Outcome:
    if _is_final(run.action, _sole(exc)):
        return Discarded(Failure.of(exc))
    return _failed_attempt(run.job, exc, _backoff(run))


def _failed_attempt(
    job: ClaimedJob, exc: BaseException, delay: timedelta, note: str = ""
) -> Retried | Discarded:
    if job.attempts_left > 0:
        return Retried(min(delay, MAX_DELAY), Failure.of(exc, note=note))
    last = f"attempt {counted(job)} of {job.max_attempts}, none left"
    return Discarded(Failure.of(exc, note=f"{last}; {note}" if note else last))


def _backoff(run: Run) -> timedelta:
    return run.action.backoff.delay(counted(run.job))


def _is_final(action: Runnable, exc: BaseException) -> bool:
    """Whether ``discard_on`` means it: the closest class decides, and ``retry_on`` wins a tie."""
    for cls in type(exc).__mro__:
        if cls in action.retry_on:
            return False
        if cls in action.discard_on:
            return True
    return False


def _because(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _sole(exc: BaseException) -> BaseException:
    """What a group is about if only one exception is in it: a TaskGroup wraps even a Snooze."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    group = cast("BaseExceptionGroup[BaseException]", exc)
    return _sole(group.exceptions[0]) if len(group.exceptions) == 1 else group

"""What the worker's log says about runs."""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from typing import Any

from cyclone_sqla.outcomes import (
    CancelledOutcome,
    Completed,
    Discarded,
    GivenBack,
    Outcome,
    Retried,
    Snoozed,
)
from cyclone_sqla.worker.runs import Finished, log_fields

log = logging.getLogger("cyclone_sqla.worker")


def say(level: int, text: str, *args: object, **options: Any) -> None:
    """Log from where nothing may be raised: a handler that fails must cost no run and no thread."""
    try:
        log.log(level, text, *args, **options)
    except BaseException:  # noqa: BLE001 - shown as logging shows the errors of its own handlers
        traceback.print_exc()


def log_outcome(finished: Finished) -> None:
    """One record for each run, at a level that tells whether anybody has to look."""
    level, text = _in_words(finished.outcome)
    if log.isEnabledFor(level):
        job = finished.job
        extra = {**log_fields(job), "seconds": finished.seconds}
        say(level, "%s job %s, attempt %s: %s", job.kind, job.id, job.attempt, text, extra=extra)


def _in_words(outcome: Outcome) -> tuple[int, str]:
    match outcome:
        case Completed(failure=failure):
            return (logging.WARNING, failure.error) if failure else (logging.DEBUG, "completed")
        case Retried(delay=delay, failure=failure):
            return logging.WARNING, f"failed, again {_in(delay)}: {failure.error}"
        case Discarded(failure=failure):
            return logging.ERROR, f"discarded: {failure.error}"
        case Snoozed(delay=delay):
            return logging.DEBUG, f"snoozed, again {_in(delay)}"
        case CancelledOutcome():
            return logging.INFO, "cancelled"
        case GivenBack():
            return logging.DEBUG, "given back before it began"


def _in(delay: timedelta) -> str:
    seconds = delay.total_seconds()
    return f"in {seconds:,.1f} s" if seconds > 0 else "at once"

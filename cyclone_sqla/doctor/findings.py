"""What a look at a queue may find."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters.

    An error: jobs stand still, or a promise is broken. A warning: it will come to that, or to slow
    claims, if nobody acts. A note: worth knowing, and nothing that has to be changed.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a look found.

    ``name`` is short and stays as it is, for programs; ``text`` is what is, ``advice`` what to do,
    each a sentence or two for people. ``can_be_mended`` says that :func:`mend` does it.
    """

    name: str
    severity: Severity
    text: str
    advice: str
    can_be_mended: bool = False

    @property
    def is_problem(self) -> bool:
        """Whether somebody has to act: it is an error or a warning."""
        return self.severity is not Severity.NOTE


def error(name: str, text: str, advice: str, *, can_be_mended: bool = False) -> Finding:
    """A finding of this severity."""
    return Finding(
        name=name,
        severity=Severity.ERROR,
        text=text,
        advice=advice,
        can_be_mended=can_be_mended,
    )


def warning(name: str, text: str, advice: str) -> Finding:
    """A finding of this severity."""
    return Finding(name=name, severity=Severity.WARNING, text=text, advice=advice)


def note(name: str, text: str, advice: str) -> Finding:
    """A finding of this severity."""
    return Finding(name=name, severity=Severity.NOTE, text=text, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beyond what something is a finding.

    ``late``: how long after its time a step of a worker (rescue, stage, admit, hand on) is missed.
    ``skew``: how far the clocks of this host and the database may differ. ``transaction``: the age
    of an open transaction. ``horizon``: how many transactions back vacuum may be held. ``dead``:
    dead rows of the job table, if they are also more than the live ones. ``connections``: the part
    of the server's connections in use. ``log``: bytes of SQLite's write-ahead log.
    """

    late: timedelta = timedelta(minutes=5)
    skew: timedelta = timedelta(seconds=5)
    transaction: timedelta = timedelta(minutes=10)
    horizon: int = 1_000_000
    dead: int = 50_000
    connections: float = 0.9
    log: int = 256 * 1024 * 1024


DEFAULT_LIMITS = Limits()
"""What is normal on a busy, healthy queue stays below these."""

"""When the steps of some work were over, noted at the seams of the library."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.own_connection import OwnConnection
from cyclone_sqla.worker.runs import Run
from cyclone_sqla.worker.wakeup import Wakeup

Stamp = tuple[str, float]
"""What was over, and when by the clock that all processes of a machine share."""


class Trail:
    """The stamps of a process, in their order."""

    def __init__(self) -> None:
        self.stamps: list[Stamp] = []

    def __call__(self, step: str) -> None:
        self.stamps.append((step, time.monotonic()))

    def watch_worker(self, dialect: Dialect) -> None:
        """From the hint to the end of a run's own transaction."""
        self._at(Wakeup, "set", before="heard")
        self._at(Wakeup, "wait", after="awake")
        self._at(dialect, "take_turn", before="asked", after="answered")
        self._at(Run, "call", before="begun", after="done")
        event.listen(Session, "before_commit", lambda _session: self("written"))
        event.listen(Session, "after_commit", lambda _session: self("committed"))

    def watch_sender(self) -> None:
        """Hints on their way out of the application."""
        self._at(OwnConnection, "execute", before="sent")

    def _at(self, owner: Any, method: str, *, before: str = "", after: str = "") -> None:
        watched: Callable[..., Any] = getattr(owner, method)

        def watching(*args: Any, **options: Any) -> Any:
            if before:
                self(before)
            answer = watched(*args, **options)
            if after:
                self(after)
            return answer

        setattr(owner, method, watching)


def steps_after(
    stamps: Sequence[Stamp], begins: Sequence[float], steps: Sequence[str], early: float = 0.001
) -> dict[str, list[float]]:
    """Seconds that each step took, by its name: one for each begin.

    The first stamp of a name counts that is not ``early`` seconds before the begin.
    """
    moments: dict[str, list[float]] = defaultdict(list)
    for step, at in stamps:
        moments[step].append(at)
    took: dict[str, list[float]] = {step: [] for step in steps}
    for begin in begins:
        before = begin
        for step in steps:
            at = next(at for at in moments[step] if at >= begin - early)
            took[step].append(at - before)
            before = at
    return took


def steps_in_turn(stamps: Sequence[Stamp]) -> dict[str, list[float]]:
    """Seconds since the stamp before each, where nothing goes on beside: by name."""
    took: dict[str, list[float]] = defaultdict(list)
    for (_, before), (step, at) in pairwise(stamps):
        took[step].append(at - before)
    return took

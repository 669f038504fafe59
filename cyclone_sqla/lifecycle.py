"""The life of a job as data: states, what a pending job waits for, and every allowed transition.

A state is written by no other code than statements built from this table, and the documentation's
table is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    AVAILABLE = "available"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the job's life has ended; only replay leads back."""
        return self in TERMINAL


class WaitsFor(StrEnum):
    """What a pending job waits for."""

    ADMISSION = "admission"
    TURN = "turn"
    TIME = "time"
    RETRY = "retry"
    DEPENDENCIES = "dependencies"


ACTIVE = (State.PENDING, State.AVAILABLE, State.RUNNING, State.PAUSED)
"""States that hold a unique key."""

TERMINAL = (State.COMPLETED, State.DISCARDED, State.CANCELLED)
"""States that end a life and free the unique key."""

DUE_BY_TIME = (WaitsFor.TIME, WaitsFor.RETRY)
"""What stage ends.

Index and statements take the list from here, so that they agree to the letter.
"""


@dataclass(frozen=True)
class Transition:
    """One verb: the states it starts from, the state it leads to, and what a pending job then waits
    for.
    """

    verb: str
    sources: tuple[State, ...]
    target: State
    waits_for: WaitsFor | None = None
    meaning: str = ""

    def allows(self, state: State) -> bool:
        """Whether a job in this state may take this step."""
        return state in self.sources


_RUNNING = (State.RUNNING,)

STAGE = Transition("stage", (State.PENDING,), State.AVAILABLE, meaning="its time has come")
CLAIM = Transition("claim", (State.AVAILABLE,), State.RUNNING, meaning="a worker took it")
RENEW = Transition("renew", _RUNNING, State.RUNNING, meaning="its worker is alive")
COMPLETE = Transition("complete", _RUNNING, State.COMPLETED, meaning="the action returned")
RETRY = Transition(
    "retry", _RUNNING, State.PENDING, WaitsFor.RETRY, meaning="the attempt failed, others remain"
)
SNOOZE = Transition(
    "snooze", _RUNNING, State.PENDING, WaitsFor.TIME, meaning="the action asked to be run later"
)
DISCARD = Transition(
    "discard", _RUNNING, State.DISCARDED, meaning="it failed for good, or its deadline has passed"
)
CANCEL = Transition("cancel", _RUNNING, State.CANCELLED, meaning="it was asked to stop")
GIVE_BACK = Transition(
    "give back", _RUNNING, State.AVAILABLE, meaning="its worker stopped before the action started"
)
RESCUE = Transition("rescue", _RUNNING, State.AVAILABLE, meaning="its lease ran out")

_WAITING = (State.PENDING, State.AVAILABLE)
_FAILED = (State.DISCARDED, State.CANCELLED)

CANCEL_ASKED = Transition(
    "cancel", ACTIVE, State.CANCELLED, meaning="a person ended it, at once unless it runs"
)
PAUSE = Transition("pause", _WAITING, State.PAUSED, meaning="a person keeps it from running")
RESUME = Transition("resume", (State.PAUSED,), State.AVAILABLE, meaning="a person let it go on")
REPLAY = Transition("replay", _FAILED, State.AVAILABLE, meaning="a person had it begin afresh")
SKIP = Transition("skip", _FAILED, State.COMPLETED, meaning="a person passed over a halted head")
DEAL_WITH = Transition(
    "skip", (State.DISCARDED,), State.DISCARDED, meaning="a person dealt with a dead letter"
)
RESCHEDULE = Transition(
    "reschedule", _WAITING, State.PENDING, WaitsFor.TIME, meaning="a person gave it another time"
)

TRANSITIONS = (
    STAGE,
    CLAIM,
    RENEW,
    COMPLETE,
    RETRY,
    SNOOZE,
    DISCARD,
    CANCEL,
    GIVE_BACK,
    RESCUE,
    CANCEL_ASKED,
    PAUSE,
    RESUME,
    REPLAY,
    SKIP,
    DEAL_WITH,
    RESCHEDULE,
)

PEOPLES_VERBS = {
    transition.verb: transition.sources
    for transition in (CANCEL_ASKED, PAUSE, RESUME, REPLAY, SKIP, RESCHEDULE)
}
"""What a person may do to a job, by verb: the states that allow it."""

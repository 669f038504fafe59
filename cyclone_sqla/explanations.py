"""Why a job isn't running: the reasons, each as data and as a sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cyclone_sqla.figures import Count
from cyclone_sqla.lifecycle import State, WaitsFor


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job isn't running now, or what became of it.

    ``reasons`` stand in the order in which they must be cleared; of a job that runs or has ended
    there is one. ``reason`` is the first one's code: codes are stable, sentences are not.
    """

    job_id: int
    kind: str
    queue: str
    state: State
    waits_for: WaitsFor | None
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """One paragraph for people."""
        job = f"job {self.job_id} ({self.kind}, queue {self.queue})"
        if self.state.is_terminal:
            return _capital(self.reasons[0].tell(job))
        waits = f" ({self.waits_for})" if self.waits_for else ""
        opening = f"{_capital(job)} is {self.state}{waits}."
        return " ".join([opening, *(reason.sentence for reason in self._to_tell())])

    def _to_tell(self) -> list[Reason]:
        """All reasons but those that stand already in what is said of the head."""
        of_head = {
            reason
            for behind in self.reasons
            if isinstance(behind, BehindHead)
            for reason in behind.head_reasons
        }
        return [reason for reason in self.reasons if reason not in of_head]

    @property
    def reason(self) -> str:
        """The code of the first reason."""
        return self.reasons[0].code


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason(ABC):
    """One thing that keeps a job from running."""

    @property
    @abstractmethod
    def code(self) -> str:
        """A short name that stays as it is, for programs."""

    @abstractmethod
    def tell(self, job: str) -> str:
        """A sentence for people; ``job`` is what the job is called in it."""

    @property
    def sentence(self) -> str:
        """The sentence, where it is clear which job is meant."""
        return _capital(self.tell("it"))


# ---- what people do ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Reason):
    """A person paused the job, its queue or its sequence; ``name`` is that of the latter two."""

    what: Literal["job", "queue", "sequence"]
    name: str | None = None
    since: datetime | None
    by: str | None

    @property
    def code(self) -> str:
        return f"{self.what}-paused"

    def tell(self, job: str) -> str:
        who = job if self.name is None else f"the {self.what} {self.name!r}"
        return (
            f"{who} has been paused{_since(self.since)}{_by(self.by)}, until somebody resumes it."
        )


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed(Reason):
    """It is not to run before ``at``. ``is_due``: that has passed, and a worker has yet to look."""

    at: datetime
    is_due: bool

    @property
    def code(self) -> str:
        return "delayed"

    def tell(self, job: str) -> str:
        if self.is_due:
            return f"{job} was due at {_time(self.at)}; a worker's next look makes it available."
        return f"{job} is due at {_time(self.at)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying(Reason):
    """It failed, and is tried again at ``at``: the attempt ``attempt`` of ``max_attempts``."""

    at: datetime
    is_due: bool
    attempt: int
    max_attempts: int
    error: str | None

    @property
    def code(self) -> str:
        return "retrying"

    def tell(self, job: str) -> str:
        when = "was due" if self.is_due else "is due"
        attempt = f"{self.attempt} of {self.max_attempts} {when} at {_time(self.at)}"
        return f"{job} failed ({_brief(self.error)}); attempt {attempt}."


# ---- its sequence --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindHead(Reason):
    """Another job has the head of its sequence.

    ``since``: when the head came into its state, or was claimed. ``next_at`` is the time of the
    head's next event, if one is known: when it is due, or its lease ends. ``ahead`` counts the jobs
    that run before this one, the head among them. ``head_reasons`` say why the head does not run.
    """

    key: str
    head: int
    head_kind: str
    head_state: State
    since: datetime
    next_at: datetime | None
    ahead: Count
    head_reasons: tuple[Reason, ...]

    @property
    def code(self) -> str:
        return "behind-head"

    def tell(self, job: str) -> str:
        head = f"job {self.head} ({self.head_kind})"
        state = f"{head}, {self.head_state} since {_time(self.since)}"
        ahead = f"{self.ahead.of_jobs()} ahead of it"
        because = " ".join(_capital(r.tell(f"job {self.head}")) for r in self.head_reasons)
        return f"{job} waits for {state}, in sequence {self.key!r}, with {ahead}. {because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHalted(Reason):
    """The head of its sequence ended badly, and stops it until a person replays or skips it."""

    key: str
    head: int
    head_kind: str
    head_state: State
    why: str
    since: datetime
    ahead: Count

    @property
    def code(self) -> str:
        return "sequence-halted"

    def tell(self, job: str) -> str:
        head = f"job {self.head} ({self.head_kind})"
        return (
            f"the sequence {self.key!r} has been halted since {_time(self.since)} by {head}, "
            f"{self.head_state}: {_brief(self.why)}. It goes on when somebody replays or skips "
            f"job {self.head}; {self.ahead.of_jobs()} ahead of {job}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Reason):
    """Its sequence has explicit positions, and ``missing`` before its own has not arrived."""

    key: str
    position: int
    missing: int
    ahead: Count

    @property
    def code(self) -> str:
        return "gap"

    def tell(self, job: str) -> str:
        ahead = f", with {self.ahead.of_jobs()} ahead of it" if self.ahead.number else ""
        return (
            f"{job} has position {self.position} of sequence {self.key!r}, and position "
            f"{self.missing} has not been enqueued{ahead}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpositioned(Reason):
    """It has no position in a sequence whose jobs have them: it will never be given a place."""

    key: str

    @property
    def code(self) -> str:
        return "unpositioned"

    def tell(self, job: str) -> str:
        return (
            f"{job} has no position, but the jobs of sequence {self.key!r} have, so it never gets "
            "a place there: cancel it, and enqueue it with a position."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming(Reason):
    """No worker has given it its place in its sequence yet, and nobody has the head."""

    key: str
    ahead: Count

    @property
    def code(self) -> str:
        return "incoming"

    def tell(self, job: str) -> str:
        ahead = f"; {self.ahead.of_jobs()} ahead of it" if self.ahead.number else ""
        return f"no worker has given {job} its place in sequence {self.key!r} yet{ahead}."


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver(Reason):
    """Nobody holds back its sequence: a worker is about to hand on the place of the last head."""

    key: str
    ahead: Count

    @property
    def code(self) -> str:
        return "hand-over"

    def tell(self, job: str) -> str:
        ahead = f"; {self.ahead.of_jobs()} ahead of {job}" if self.ahead.number else ""
        return (
            f"a worker is about to give the head of sequence {self.key!r} to the next job{ahead}."
        )


# ---- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWorker(Reason):
    """None of the ``live_workers`` (0: none at all is alive) serves its queue."""

    queue: str
    live_workers: int

    @property
    def code(self) -> str:
        return "no-worker"

    def tell(self, job: str) -> str:
        if self.live_workers == 0:
            return "no worker is alive."
        return f"none of the live workers ({self.live_workers}) serves the queue {self.queue!r}."


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKind(Reason):
    """Live ``workers`` (by name) serve its queue, but none of them has code for its kind."""

    queue: str
    kind: str
    workers: tuple[str, ...]

    @property
    def code(self) -> str:
        return "unknown-kind"

    def tell(self, job: str) -> str:
        who = ", ".join(self.workers[:3]) + (", …" if len(self.workers) > 3 else "")
        return f"no live worker of the queue {self.queue!r} ({who}) knows the kind {self.kind!r}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated(Reason):
    """All slots that live workers have for its queue and kind are in use.

    ``ahead`` counts available jobs of its kind and queue that come before it.
    """

    queue: str
    workers: int
    slots: int
    ahead: Count

    @property
    def code(self) -> str:
        return "queue-saturated"

    def tell(self, job: str) -> str:
        return (
            f"all {self.slots} slots of the live workers ({self.workers}) for the queue "
            f"{self.queue!r} are in use; {self.ahead.of_jobs()} of the kind ahead of {job}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingForWorker(Reason):
    """Nothing holds it back: live workers with free slots are about to take it."""

    queue: str
    workers: int
    ahead: Count

    @property
    def code(self) -> str:
        return "waiting-for-worker"

    def tell(self, job: str) -> str:
        return (
            f"nothing holds {job} back: {self.workers} live worker"
            f"{'' if self.workers == 1 else 's'} of the queue {self.queue!r} can take it, "
            f"{self.ahead.of_jobs()} of the kind ahead of it."
        )


# ---- it runs, or has ended -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Reason):
    """A live worker runs it under a lease until ``until``."""

    worker: str
    since: datetime
    until: datetime
    attempt: int
    max_attempts: int
    cancel_requested_at: datetime | None

    @property
    def code(self) -> str:
        return "running"

    def tell(self, job: str) -> str:
        return (
            f"worker {self.worker} has been running {job} since {_time(self.since)} (attempt "
            f"{self.attempt} of {self.max_attempts}), under a lease until {_time(self.until)}."
            f"{_asked(self.cancel_requested_at)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Reason):
    """Its worker is presumed dead: the lease ran out, or nothing was heard of it for a minute.

    ``last_seen`` is None if the worker has no record (any more). It runs again, or is discarded at
    its limit, once a live worker finds that the lease has run out.
    """

    worker: str
    last_seen: datetime | None
    until: datetime
    is_over: bool
    attempt: int
    max_attempts: int
    cancel_requested_at: datetime | None

    @property
    def code(self) -> str:
        return "worker-lost"

    def tell(self, job: str) -> str:
        seen = "has no record" if self.last_seen is None else _seen(self.last_seen)
        lease = "ran out" if self.is_over else "runs out"
        return (
            f"worker {self.worker}, which {seen}, is presumed dead in attempt {self.attempt} of "
            f"{self.max_attempts}; its lease of {job} {lease} at {_time(self.until)}, after which "
            f"any live worker puts the job back.{_asked(self.cancel_requested_at)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Reason):
    """It has ended. ``why`` is its last error; ``by`` who cancelled or skipped it, if recorded.

    ``halts`` is the key of the sequence that it stops, or (``has_turn`` is False) will stop when
    its turn comes; ``waiting`` counts the jobs behind it there.
    """

    state: State
    at: datetime
    why: str | None
    by: str | None
    is_skipped: bool
    dead_letter: bool
    halts: str | None
    has_turn: bool
    waiting: Count

    @property
    def code(self) -> str:
        return self.state

    def tell(self, job: str) -> str:
        state = "completed as skipped" if self.is_skipped else self.state
        why = "" if self.why is None or self.state == State.COMPLETED else f": {_brief(self.why)}"
        return f"{job} was {state} at {_time(self.at)}{_by(self.by)}{why}.{self._consequence()}"

    def _consequence(self) -> str:
        if self.halts is not None:
            halts = "halts" if self.has_turn else "will, when its turn comes, halt"
            return (
                f" It {halts} the sequence {self.halts!r} until somebody replays or skips it; "
                f"{self.waiting.of_jobs()} behind it."
            )
        if self.dead_letter:
            return " It is a dead letter, until somebody replays or skips it."
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsForDependencies(Reason):
    """Jobs that it depends on have not ended."""

    @property
    def code(self) -> str:
        return "dependencies"

    def tell(self, job: str) -> str:
        return f"{job} waits for the jobs that it depends on."


# ---- words ---------------------------------------------------------------------------------------

LONGEST_ERROR = 200
"""Characters of an error that a sentence holds."""


def _brief(error: str | None) -> str:
    line = " ".join((error or "no error recorded").split())
    return line if len(line) <= LONGEST_ERROR else f"{line[: LONGEST_ERROR - 1]}…"


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _since(time: datetime | None) -> str:
    return "" if time is None else f" since {_time(time)}"


def _seen(time: datetime) -> str:
    return f"was last seen at {_time(time)}"


def _by(who: str | None) -> str:
    return "" if who is None else f" by {who}"


def _asked(time: datetime | None) -> str:
    return "" if time is None else f" It was asked to stop at {_time(time)}."


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]

"""One run of one job, while it lasts: what is called, until when, and who asked it to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from enum import StrEnum
from time import monotonic
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from cyclone_sqla.backoff import BackoffPolicy
from cyclone_sqla.context import ClaimedJob, Context, Transaction
from cyclone_sqla.errors import ConfigurationError, PayloadError
from cyclone_sqla.failures import Failure
from cyclone_sqla.outcomes import Cancelled, Completed, Discard, Outcome

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

log = logging.getLogger("cyclone_sqla.worker.action")

_Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_COMPLETED = Completed()


class Runnable(Protocol):
    """What a run needs of an action."""

    @property
    def fn(self) -> Callable[..., Any]:
        """The user's function."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether it is called in the event loop rather than in a thread."""
        ...

    @property
    def takes_context(self) -> bool:
        """Whether its first argument is the :class:`Context`."""
        ...

    @property
    def timeout(self) -> timedelta | None:
        """How long a run may take, unless the job says otherwise."""
        ...

    @property
    def backoff(self) -> BackoffPolicy:
        """How long to wait after a failed attempt."""
        ...

    @property
    def retry_on(self) -> tuple[type[BaseException], ...]:
        """Exceptions that are worth another attempt, though a base class is in ``discard_on``."""
        ...

    @property
    def discard_on(self) -> tuple[type[BaseException], ...]:
        """Exceptions after which no attempt can succeed."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether there are instances of mapped classes among its arguments."""
        ...

    def decode(self, text: str, /) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments; PayloadError if this code can't read them."""
        ...

    def load(self, text: str, session: Session, /) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The same with the rows loaded; Discard if one has gone."""
        ...

    def encode_result(self, value: Any, /) -> str | None:
        """The result as JSON text; PayloadError if it can't be stored."""
        ...


class Interruption(StrEnum):
    """Why a run is asked to stop."""

    CANCELLED = "cancellation was asked for"
    TIMED_OUT = "timed out"
    EXPIRED = "its deadline has passed"
    LEASE_LOST = "its lease was lost"
    STOPPING = "the worker is stopping"


class Written(NamedTuple):
    """A run's end that its own transaction has written; the stager may have to look at its line."""

    calls_for_a_look: bool


class Finished(NamedTuple):
    """A run that has ended, how, and how many seconds it took.

    ``written`` tells that its own transaction has written the end; it ``is_doubtful`` if the answer
    to its commit was lost.
    """

    job: ClaimedJob
    outcome: Outcome
    seconds: float
    written: Written | None = None
    is_doubtful: bool = False


class Unit(Transaction, Protocol):
    """What the executor asks of the transaction of a run."""

    is_async: bool

    @property
    def is_open(self) -> bool:
        """Whether the action asked for its session."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether a commit was begun."""
        ...

    def commit(self, outcome: Outcome) -> Written | None:
        """Commit what the action did, together with the end of its run."""
        ...

    def starts_over(self, exc: BaseException) -> bool:
        """Roll back; whether the action is to be run again in the same attempt."""
        ...

    def roll_back(self) -> None:
        """Undo what the action did."""
        ...


class Limit(NamedTuple):
    """When a run must have ended, on the monotonic clock, and what it means if it has not."""

    at: float
    meaning: Interruption


class Run:
    """A job with its action, from the claim until its outcome is known."""

    __slots__ = (
        "action",
        "cancel_is_due",
        "ctx",
        "handed_in",
        "interruptions",
        "job",
        "key",
        "limit",
        "started",
        "task",
        "unit",
    )

    def __init__(self, job: ClaimedJob, action: Runnable, unit: Unit | None = None) -> None:
        self.job = job
        # With the lease: a job may be claimed anew by the worker whose old run still lives.
        self.key = (job.id, job.lease)
        self.action = action
        self.unit = unit
        self.ctx = (
            Context(job, JobLog(log, log_fields(job)), unit) if action.takes_context else None
        )
        self.interruptions: tuple[Interruption, ...] = ()
        self.cancel_is_due = False
        self.limit: Limit | None = None
        self.task: asyncio.Task[None] | None = None
        self.handed_in = self.started = monotonic()

    def begin(self) -> None:
        """The clock of the run starts, just before its action is called."""
        self.started = monotonic()
        self.limit = self._earliest_limit()
        if self.job.expired:
            self.interrupt(Interruption.EXPIRED)
        elif self.limit is not None and self.limit.at <= self.started:
            self.interrupt(self.limit.meaning)

    def call(self) -> Any:
        """What the action returns: of an async one, its awaitable. Raises whatever it raises."""
        if self.interruption is not None:
            raise Cancelled(self.interruption)
        if self.action.takes_rows:
            return self._call_with_rows()
        return self._call(self._arguments(self.action.decode))

    def _call_with_rows(self) -> Any:
        if self.unit is None:
            raise ConfigurationError("this run has no database to load its arguments from")
        if self.unit.is_async:
            return self._load_and_call(self.unit.async_session)
        return self._call(self._loaded(self.unit.session))

    async def _load_and_call(self, session: AsyncSession) -> Any:
        return await self._call(await session.run_sync(self._loaded))

    def _loaded(self, session: Session) -> _Arguments:
        return self._arguments(lambda text: self.action.load(text, session))

    def _call(self, arguments: _Arguments) -> Any:
        args, kwargs = arguments
        if self.ctx is not None:
            return self.action.fn(self.ctx, *args, **kwargs)
        return self.action.fn(*args, **kwargs)

    def completed(self, value: Any) -> Completed:
        """The outcome of a run that returned: a result that can't be kept doesn't undo the work."""
        if value is None:
            return _COMPLETED
        if isinstance(value, GeneratorType | AsyncGeneratorType):
            raise TypeError("the action returned a generator, so its body has not run")
        try:
            return Completed(self.action.encode_result(value))
        except BaseException as exc:  # noqa: BLE001 - encoding calls code of the value's own
            return Completed(failure=Failure.of(exc, note="completed, but the result was not kept"))

    def interrupt(self, why: Interruption) -> bool:
        """Ask the run to stop; False if it was asked for this reason before."""
        if why in self.interruptions:
            return False
        self.interruptions += (why,)
        self.cancel_is_due = True
        if self.ctx is not None:
            self.ctx._cancel(why)  # pyright: ignore[reportPrivateUsage]
        return True

    @property
    def interruption(self) -> Interruption | None:
        """Why the run was first asked to stop; None if it was not."""
        return self.interruptions[0] if self.interruptions else None

    @property
    def timeout(self) -> timedelta | None:
        """How long the run may take: what the job says, else what the action says."""
        return self.job.timeout if self.job.timeout is not None else self.action.timeout

    def _earliest_limit(self) -> Limit | None:
        timeout, left = self.timeout, self.job.time_left
        if timeout is None and left is None:
            return None
        limits: list[Limit] = []
        if timeout is not None:
            limits.append(Limit(self.started + timeout.total_seconds(), Interruption.TIMED_OUT))
        if left is not None:
            limits.append(Limit(self.handed_in + left.total_seconds(), Interruption.EXPIRED))
        return min(limits)

    def _arguments(self, read: Callable[[str], _Arguments]) -> _Arguments:
        try:
            return read(self.job.arguments)
        except PayloadError as exc:
            # Another attempt by the same code would read the same text.
            raise Discard(f"this code can't read the job's arguments: {exc}") from exc


class JobLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the job to every record, beside the caller's ``extra``, which Python 3.11 would drop."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge both dictionaries of extra fields."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def is_awaitable(value: object) -> bool:
    """Whether it has to be awaited; far cheaper than ``inspect.isawaitable``."""
    return hasattr(type(value), "__await__")


def log_fields(job: ClaimedJob) -> dict[str, object]:
    """What every log record about a run carries."""
    return {"job_id": job.id, "kind": job.kind, "queue": job.queue, "attempt": job.attempt}

"""What people do: cancel, pause, resume, replay, skip, reschedule; of jobs, queues and sequences.

Every verb takes part in the caller's transaction, as enqueue does, and waits for a row that another
transaction has locked. ``by`` says who acts; it stands in the job's history.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from cyclone_sqla import interventions
from cyclone_sqla.binding import AsyncTarget, SyncTarget, run
from cyclone_sqla.bulk import BulkReport
from cyclone_sqla.dialects import Dialect, HintMode
from cyclone_sqla.errors import InvalidJobError
from cyclone_sqla.hints import CALL_TO_ADMIT, CALL_TO_RENEW
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.keys import check_key
from cyclone_sqla.models import Job
from cyclone_sqla.options import check_name, check_options

T = TypeVar("T")


class Control(ABC):
    """The part of an application's handle that acts on jobs which are there."""

    job_class: type[Job]
    hints: HintMode
    hint_url: sa.URL | None

    @abstractmethod
    def dialect_for(self, connection: Connection) -> Dialect:
        """This application's statements for the connection's database."""

    @abstractmethod
    def encode_arguments(self, kind: str, arguments: Mapping[str, Any]) -> str:
        """Arguments as JSON text, checked against the kind's action if it is registered."""

    # ---- jobs

    @overload
    def cancel(self, target: SyncTarget, job_id: int, /, *, by: str | None = None) -> JobRef: ...
    @overload
    def cancel(
        self, target: AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, JobRef]: ...
    def cancel(
        self, target: SyncTarget | AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """End a waiting job at once, or ask a running one to stop.

        One that was asked ends as cancelled, whatever its action does.

        Raises JobNotFoundError and InvalidTransitionError.
        """
        return self._act(target, partial(interventions.cancel, job_id=job_id, by=by))

    @overload
    def pause(self, target: SyncTarget, job_id: int, /, *, by: str | None = None) -> JobRef: ...
    @overload
    def pause(
        self, target: AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, JobRef]: ...
    def pause(
        self, target: SyncTarget | AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Keep a waiting job from running. It keeps its unique key and its place.

        Raises JobNotFoundError and InvalidTransitionError.
        """
        return self._act(target, partial(interventions.pause, job_id=job_id, by=by))

    @overload
    def resume(self, target: SyncTarget, job_id: int, /, *, by: str | None = None) -> JobRef: ...
    @overload
    def resume(
        self, target: AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, JobRef]: ...
    def resume(
        self, target: SyncTarget | AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Let a paused job go on.

        Raises JobNotFoundError and InvalidTransitionError.
        """
        return self._act(target, partial(interventions.resume, job_id=job_id, by=by))

    @overload
    def replay(
        self,
        target: SyncTarget,
        job_id: int,
        /,
        *,
        arguments: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> JobRef: ...
    @overload
    def replay(
        self,
        target: AsyncTarget,
        job_id: int,
        /,
        *,
        arguments: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> Coroutine[Any, Any, JobRef]: ...
    def replay(
        self,
        target: SyncTarget | AsyncTarget,
        job_id: int,
        /,
        *,
        arguments: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Have a failed or cancelled job begin afresh, in its old place in its sequence.

        ``arguments`` replace the old ones, checked as at an enqueue. Raises DuplicateError if
        another job holds its unique key by now, JobNotFoundError and InvalidTransitionError.
        """

        def act(connection: Connection, dialect: Dialect) -> JobRef:
            text = None
            if arguments is not None:
                kind = interventions.kind_of(connection, dialect, job_id)
                text = self.encode_arguments(kind, arguments)
            return interventions.replay(connection, dialect, job_id, by, text)

        return self._act(target, act)

    @overload
    def skip(self, target: SyncTarget, job_id: int, /, *, by: str | None = None) -> JobRef: ...
    @overload
    def skip(
        self, target: AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, JobRef]: ...
    def skip(
        self, target: SyncTarget | AsyncTarget, job_id: int, /, *, by: str | None = None
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Pass over the head that halts its sequence, or mark a dead letter as dealt with.

        Raises JobNotFoundError and InvalidTransitionError.
        """
        return self._act(target, partial(interventions.skip, job_id=job_id, by=by))

    @overload
    def reschedule(
        self,
        target: SyncTarget,
        job_id: int,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        by: str | None = None,
    ) -> JobRef: ...
    @overload
    def reschedule(
        self,
        target: AsyncTarget,
        job_id: int,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        by: str | None = None,
    ) -> Coroutine[Any, Any, JobRef]: ...
    def reschedule(
        self,
        target: SyncTarget | AsyncTarget,
        job_id: int,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        by: str | None = None,
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Give a waiting job another time: an aware datetime, or a delay from now (seconds).

        Raises JobNotFoundError and InvalidTransitionError.
        """
        times = checked_times(process_at, process_in)
        return self._act(target, partial(interventions.reschedule, job_id=job_id, by=by, **times))

    # ---- queues

    @overload
    def pause_queue(self, target: SyncTarget, queue: str, /, *, by: str | None = None) -> None: ...
    @overload
    def pause_queue(
        self, target: AsyncTarget, queue: str, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, None]: ...
    def pause_queue(
        self, target: SyncTarget | AsyncTarget, queue: str, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """Nobody claims from the queue until it is resumed.

        Enqueue works, and jobs that run go on.
        """
        checked = check_name("queue", queue)
        return self._act(target, partial(interventions.pause_queue, queue=checked, by=by))

    @overload
    def resume_queue(self, target: SyncTarget, queue: str, /) -> bool: ...
    @overload
    def resume_queue(self, target: AsyncTarget, queue: str, /) -> Coroutine[Any, Any, bool]: ...
    def resume_queue(
        self, target: SyncTarget | AsyncTarget, queue: str, /
    ) -> bool | Coroutine[Any, Any, bool]:
        """Have workers claim from the queue again; False if it was not paused."""
        checked = check_name("queue", queue)
        return self._act(target, partial(interventions.resume_queue, queue=checked))

    # ---- sequences

    @overload
    def pause_sequence(self, target: SyncTarget, key: str, /, *, by: str | None = None) -> None: ...
    @overload
    def pause_sequence(
        self, target: AsyncTarget, key: str, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, None]: ...
    def pause_sequence(
        self, target: SyncTarget | AsyncTarget, key: str, /, *, by: str | None = None
    ) -> Coroutine[Any, Any, None] | None:
        """No job of the sequence starts until it is resumed. One that runs goes on."""
        checked = check_key("sequence", key)
        return self._act(target, partial(interventions.pause_sequence, key=checked, by=by))

    @overload
    def resume_sequence(self, target: SyncTarget, key: str, /) -> bool: ...
    @overload
    def resume_sequence(self, target: AsyncTarget, key: str, /) -> Coroutine[Any, Any, bool]: ...
    def resume_sequence(
        self, target: SyncTarget | AsyncTarget, key: str, /
    ) -> bool | Coroutine[Any, Any, bool]:
        """Let the sequence go on; False if it was not paused."""
        checked = check_key("sequence", key)
        return self._act(target, partial(interventions.resume_sequence, key=checked))

    def _act(
        self, target: SyncTarget | AsyncTarget, act: Callable[[Connection, Dialect], T]
    ) -> T | Coroutine[Any, Any, T]:
        """Act in the target's transaction; workers look when it has committed."""

        def work(connection: Connection, session: Session | None) -> T:
            dialect = self.dialect_for(connection)
            dialect.refuse_unfit(connection)
            with dialect.enqueueing(connection):
                result = act(connection, dialect)
            calls = {CALL_TO_ADMIT, CALL_TO_RENEW, *_queues_of(result)}
            dialect.tell_workers(connection, session, calls, mode=self.hints, url=self.hint_url)
            return result

        return run(target, work, self.job_class)


def checked_times(process_at: object, process_in: object) -> dict[str, Any]:
    """A time or a delay, one of which is None.

    Raises InvalidJobError.
    """
    times = check_options({"process_at": process_at, "process_in": process_in})
    if len(times) != 1:
        raise InvalidJobError("process_at, process_in: give one of them")
    return {"process_at": times.get("process_at"), "process_in": times.get("process_in")}


def _queues_of(result: object) -> set[str]:
    """The queues of the jobs that were acted on."""
    if isinstance(result, BulkReport):
        return {ref.queue for ref in result.done}
    return {result.queue} if isinstance(result, JobRef) else set()

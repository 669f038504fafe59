"""People's verbs on many jobs: what they do to one, to all that a filter means."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from typing import Any, overload

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from cyclone_sqla import bulk, interventions
from cyclone_sqla.binding import AsyncTarget, SyncTarget, run
from cyclone_sqla.bulk import Act, BulkReport
from cyclone_sqla.control import Control, checked_times
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import InvalidJobError
from cyclone_sqla.job_filter import JobFilter

BATCH = 100
"""How many jobs one call takes, unless it says otherwise."""

MAX_BATCH = 10_000
"""The most jobs that one call takes."""


class BulkControl(Control):
    """The part of an application's handle that acts on many jobs.

    One call is one batch in the caller's transaction: go on with ``after=report.after``, in the
    next transaction, until that is None. ``preview=True`` changes nothing and says what would be
    done. Jobs are taken by id; without a state in the filter, those whose state allows the verb.
    One that another transaction has locked is refused, not waited for; a replay may yet wait for a
    transaction that takes its unique key. An empty filter is refused (InvalidJobError).
    """

    @overload
    def cancel_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def cancel_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def cancel_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """End waiting jobs, and ask running ones to stop."""
        act = partial(interventions.cancel, by=by)
        return self._act_on_batch(target, "cancel", act, wanted, after, limit, preview)

    @overload
    def pause_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def pause_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def pause_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """Keep waiting jobs from running."""
        act = partial(interventions.pause, by=by)
        return self._act_on_batch(target, "pause", act, wanted, after, limit, preview)

    @overload
    def resume_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def resume_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def resume_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """Let paused jobs go on."""
        act = partial(interventions.resume, by=by)
        return self._act_on_batch(target, "resume", act, wanted, after, limit, preview)

    @overload
    def replay_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def replay_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def replay_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """Have failed and cancelled jobs begin afresh, with the arguments that they have."""
        act = partial(interventions.replay, by=by, arguments=None)
        return self._act_on_batch(target, "replay", act, wanted, after, limit, preview)

    @overload
    def skip_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def skip_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def skip_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """Pass over heads that halt their sequences, and mark dead letters as dealt with."""
        act = partial(interventions.skip, by=by)
        return self._act_on_batch(target, "skip", act, wanted, after, limit, preview)

    @overload
    def reschedule_many(
        self,
        target: SyncTarget,
        wanted: JobFilter,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport: ...
    @overload
    def reschedule_many(
        self,
        target: AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> Coroutine[Any, Any, BulkReport]: ...
    def reschedule_many(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter,
        /,
        *,
        process_at: datetime | None = None,
        process_in: timedelta | float | None = None,
        after: int = 0,
        limit: int = BATCH,
        preview: bool = False,
        by: str | None = None,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        """Give waiting jobs another time: an aware datetime, or a delay from now (seconds)."""
        times = checked_times(process_at, process_in)
        act = partial(interventions.reschedule, by=by, **times)
        return self._act_on_batch(target, "reschedule", act, wanted, after, limit, preview)

    def _act_on_batch(
        self,
        target: SyncTarget | AsyncTarget,
        verb: str,
        act: Act,
        wanted: JobFilter,
        after: int,
        limit: int,
        preview: bool,
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        if wanted.is_empty:
            raise InvalidJobError(f"{verb}_many: the filter is empty, which would mean every job")
        if not 0 < limit <= MAX_BATCH:
            raise InvalidJobError(f"limit: must be from 1 to {MAX_BATCH}")
        look = partial(
            bulk.act_on_batch,
            verb=verb,
            act=act,
            wanted=wanted,
            after=after,
            limit=limit,
            preview=preview,
        )
        return self._preview(target, look) if preview else self._act(target, look)

    def _preview(
        self,
        target: SyncTarget | AsyncTarget,
        look: Callable[[Connection, Dialect], BulkReport],
    ) -> BulkReport | Coroutine[Any, Any, BulkReport]:
        def work(connection: Connection, _session: Session | None) -> BulkReport:
            return look(connection, self.dialect_for(connection))

        return run(target, work, self.job_class)

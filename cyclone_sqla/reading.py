"""What an application may ask of its queue: one job, why it waits, queues, sequences, figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from cyclone_sqla import explaining, inspection
from cyclone_sqla.binding import AsyncTarget, SyncTarget, run
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import InvalidJobError, JobNotFoundError
from cyclone_sqla.explanations import Explanation
from cyclone_sqla.figures import HaltedSequence, JobEvent, QueueFigures, SequenceFigures, Stats
from cyclone_sqla.inspection_statements import at_most, conditions
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.job_spec import MAX_ID
from cyclone_sqla.keys import check_key
from cyclone_sqla.models import Job

T = TypeVar("T")

MAX_PAGE = 10_000
"""The most jobs or sequences of one answer."""


class Reading(ABC):
    """The part of an application's handle that only reads.

    Everything is read in the target's transaction and takes no lock. Several things that are read
    one after the other may change in between, unless the transaction has a snapshot.
    """

    job_class: type[Job]

    @abstractmethod
    def dialect_for(self, connection: Connection) -> Dialect:
        """This application's statements for the connection's database."""

    # ---- one job ---------------------------------------------------------------------------------

    @overload
    def get(self, target: SyncTarget, job_id: int, /) -> Job: ...
    @overload
    def get(self, target: AsyncTarget, job_id: int, /) -> Coroutine[Any, Any, Job]: ...
    @overload
    def get(self, target: SyncTarget, /, *, sequence: str, position: int) -> Job: ...
    @overload
    def get(
        self, target: AsyncTarget, /, *, sequence: str, position: int
    ) -> Coroutine[Any, Any, Job]: ...
    def get(
        self,
        target: SyncTarget | AsyncTarget,
        job_id: int | None = None,
        /,
        *,
        sequence: str | None = None,
        position: int | None = None,
    ) -> Job | Coroutine[Any, Any, Job]:
        """The job as it is now, by its id or by its explicit position in a sequence.

        From a Session it is one of its objects; from a Connection it belongs to no session. Raises
        JobNotFoundError.
        """
        find = _finder(job_id, sequence, position)

        def work(connection: Connection, session: Session | None) -> Job:
            found = find(connection, self.dialect_for(connection))
            if session is not None:
                return self._read(session, connection, found)
            with Session(connection, join_transaction_mode="rollback_only") as reader:
                job = self._read(reader, connection, found)
                reader.expunge(job)
                return job

        return run(target, work, self.job_class)

    def _read(self, session: Session, connection: Connection, job_id: int) -> Job:
        job = None
        if 0 < job_id <= MAX_ID:  # any other number would be an error of the database
            bind = {"bind": connection}
            with session.no_autoflush:
                job = session.get(
                    self.job_class, job_id, populate_existing=True, bind_arguments=bind
                )
        if job is None:
            raise JobNotFoundError(f"there is no job {job_id} in this database")
        return job

    @overload
    def explain(self, target: SyncTarget, job_id: int, /) -> Explanation: ...
    @overload
    def explain(self, target: AsyncTarget, job_id: int, /) -> Coroutine[Any, Any, Explanation]: ...
    def explain(
        self, target: SyncTarget | AsyncTarget, job_id: int, /
    ) -> Explanation | Coroutine[Any, Any, Explanation]:
        """Why a job isn't running, or that it runs, or what became of it.

        Cheap whatever the backlog: it reads a few rows through indexes, and counts up to 1,000.
        Raises JobNotFoundError.
        """
        checked = _checked_id(job_id)

        def look(connection: Connection, dialect: Dialect) -> Explanation:
            if not 0 < checked <= MAX_ID:  # any other number would be an error of the database
                raise JobNotFoundError(f"there is no job {checked} in this database")
            return explaining.explain(connection, dialect, checked)

        return self._look(target, look)

    @overload
    def history(self, target: SyncTarget, job_id: int, /) -> list[JobEvent]: ...
    @overload
    def history(
        self, target: AsyncTarget, job_id: int, /
    ) -> Coroutine[Any, Any, list[JobEvent]]: ...
    def history(
        self, target: SyncTarget | AsyncTarget, job_id: int, /
    ) -> list[JobEvent] | Coroutine[Any, Any, list[JobEvent]]:
        """What is written down of a job, the oldest first: failed attempts, rescues, people's acts.

        At most the last 1,000; empty of a job that is not there.
        """
        checked = min(max(_checked_id(job_id), 0), MAX_ID)
        return self._look(target, partial(inspection.history, job_id=checked))

    # ---- many jobs -------------------------------------------------------------------------------

    @overload
    def jobs(
        self,
        target: SyncTarget,
        wanted: JobFilter | None = None,
        /,
        *,
        limit: int = 100,
        after: int | None = None,
        newest_first: bool = False,
    ) -> list[Job]: ...
    @overload
    def jobs(
        self,
        target: AsyncTarget,
        wanted: JobFilter | None = None,
        /,
        *,
        limit: int = 100,
        after: int | None = None,
        newest_first: bool = False,
    ) -> Coroutine[Any, Any, list[Job]]: ...
    def jobs(
        self,
        target: SyncTarget | AsyncTarget,
        wanted: JobFilter | None = None,
        /,
        *,
        limit: int = 100,
        after: int | None = None,
        newest_first: bool = False,
    ) -> list[Job] | Coroutine[Any, Any, list[Job]]:
        """A page of the jobs that a filter means, by id; ``after`` is the last id of the page
        before.

        A page is as quick as its jobs are close to each other: a filter that few jobs match reads
        past the others. The objects belong to the target as those of :meth:`get` do.
        """
        limit = _checked_limit(limit)

        def work(connection: Connection, session: Session | None) -> list[Job]:
            self.dialect_for(connection)
            statement = self._page(wanted or JobFilter(), limit, after, newest_first=newest_first)
            if session is not None:
                return _read_all(session, connection, statement)
            with Session(connection, join_transaction_mode="rollback_only") as reader:
                jobs = _read_all(reader, connection, statement)
                reader.expunge_all()
                return jobs

        return run(target, work, self.job_class)

    def _page(
        self, wanted: JobFilter, limit: int, after: int | None, *, newest_first: bool
    ) -> sa.Select[Any]:
        job = self.job_class
        page = sa.select(job).where(*conditions(job, wanted)).limit(at_most(limit))
        if after is not None:
            page = page.where(job.id < after if newest_first else job.id > after)
        return page.order_by(job.id.desc() if newest_first else job.id)

    # ---- queues and sequences --------------------------------------------------------------------

    @overload
    def queues(self, target: SyncTarget, /) -> list[QueueFigures]: ...
    @overload
    def queues(self, target: AsyncTarget, /) -> Coroutine[Any, Any, list[QueueFigures]]: ...
    def queues(
        self, target: SyncTarget | AsyncTarget, /
    ) -> list[QueueFigures] | Coroutine[Any, Any, list[QueueFigures]]:
        """Every queue that has jobs, is paused, or is served by a live worker; by name.

        Counts are bounded: they say so where there are 10,000 jobs or more.
        """
        return self._look(target, inspection.queues)

    @overload
    def sequences(
        self,
        target: SyncTarget,
        /,
        *,
        limit: int = 100,
        after: str = "",
        only_paused: bool = False,
    ) -> list[SequenceFigures]: ...
    @overload
    def sequences(
        self,
        target: AsyncTarget,
        /,
        *,
        limit: int = 100,
        after: str = "",
        only_paused: bool = False,
    ) -> Coroutine[Any, Any, list[SequenceFigures]]: ...
    def sequences(
        self,
        target: SyncTarget | AsyncTarget,
        /,
        *,
        limit: int = 100,
        after: str = "",
        only_paused: bool = False,
    ) -> list[SequenceFigures] | Coroutine[Any, Any, list[SequenceFigures]]:
        """A page of the sequences that have jobs in line, by key (in the database's order); or of
        those that are paused. ``after`` is the last key of the page before.

        Who waits is counted up to 1,000.
        """
        look = partial(
            inspection.sequences,
            after=_checked_key(after),
            limit=_checked_limit(limit),
            only_paused=only_paused,
        )
        return self._look(target, look)

    @overload
    def sequence(self, target: SyncTarget, key: str, /) -> SequenceFigures: ...
    @overload
    def sequence(
        self, target: AsyncTarget, key: str, /
    ) -> Coroutine[Any, Any, SequenceFigures]: ...
    def sequence(
        self, target: SyncTarget | AsyncTarget, key: str, /
    ) -> SequenceFigures | Coroutine[Any, Any, SequenceFigures]:
        """One sequence as it is now; an empty one if no job of the key is in line."""
        checked = check_key("sequence", key)

        def look(connection: Connection, dialect: Dialect) -> SequenceFigures:
            (line,) = inspection.lines(connection, dialect, [checked])
            return line

        return self._look(target, look)

    @overload
    def halted_sequences(
        self, target: SyncTarget, /, *, limit: int = 100, after: int = 0
    ) -> list[HaltedSequence]: ...
    @overload
    def halted_sequences(
        self, target: AsyncTarget, /, *, limit: int = 100, after: int = 0
    ) -> Coroutine[Any, Any, list[HaltedSequence]]: ...
    def halted_sequences(
        self, target: SyncTarget | AsyncTarget, /, *, limit: int = 100, after: int = 0
    ) -> list[HaltedSequence] | Coroutine[Any, Any, list[HaltedSequence]]:
        """A page of the sequences that stand until a person replays or skips their head.

        They come in the order of their heads' ids; ``after`` is the last head of the page before.
        Who waits is counted up to 1,000.
        """
        look = partial(
            inspection.halted_sequences, after=_checked_id(after), limit=_checked_limit(limit)
        )
        return self._look(target, look)

    @overload
    def stats(self, target: SyncTarget, /) -> Stats: ...
    @overload
    def stats(self, target: AsyncTarget, /) -> Coroutine[Any, Any, Stats]: ...
    def stats(self, target: SyncTarget | AsyncTarget, /) -> Stats | Coroutine[Any, Any, Stats]:
        """The whole at a glance: jobs by state, what stands, who works.

        Counts are bounded: they say so where there are 10,000 jobs or more.
        """
        return self._look(target, inspection.stats)

    def _look(
        self, target: SyncTarget | AsyncTarget, look: Callable[[Connection, Dialect], T]
    ) -> T | Coroutine[Any, Any, T]:
        def work(connection: Connection, _session: Session | None) -> T:
            return look(connection, self.dialect_for(connection))

        return run(target, work, self.job_class)


def _finder(
    job_id: int | None, sequence: str | None, position: int | None
) -> Callable[[Connection, Dialect], int]:
    """How a job is found: by its id, or by its place."""
    if job_id is not None and sequence is None and position is None:
        known = _checked_id(job_id)
        return lambda _connection, _dialect: known
    if job_id is not None or sequence is None or position is None:
        raise TypeError("get() takes a job's id, or its sequence and position")
    key, place = check_key("sequence", sequence), _checked_id(position)
    if place > MAX_ID:
        raise JobNotFoundError(f"position {place} of sequence {key!r}: no such job")
    return partial(inspection.id_at, key=key, position=place)


def _checked_id(job_id: object) -> int:
    # Not everybody uses a type checker, and True is an int.
    if isinstance(job_id, bool) or not isinstance(job_id, int):
        raise TypeError(f"a job id is an int, not {type(job_id).__name__}")
    return job_id


def _checked_key(after: object) -> str:
    return "" if isinstance(after, str) and not after else check_key("after", after)


def _checked_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit <= MAX_PAGE:
        raise InvalidJobError(f"limit: must be an int from 1 to {MAX_PAGE}")
    return limit


def _read_all(session: Session, connection: Connection, statement: sa.Select[Any]) -> list[Job]:
    with session.no_autoflush:
        found = session.scalars(
            statement,
            execution_options={"populate_existing": True},
            bind_arguments={"bind": connection},
        )
        return list(found)

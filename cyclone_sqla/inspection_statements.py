"""The statements of those who look: every one reads a bounded number of rows through an index.

An index alone does not bound a look: each also has an ORDER BY that only the index gives, and a
limit by :func:`at_most`, or statistics from another day make PostgreSQL read the table for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, ColumnElement, Text, bindparam, func, select

from cyclone_sqla.figures import MOST_COUNTED, WINDOW
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.lifecycle import TERMINAL, State
from cyclone_sqla.line_statements import KEYS
from cyclone_sqla.models import (
    HAS_POSITION,
    IS_AVAILABLE,
    IS_DEAD_LETTER,
    IS_DEBT,
    IS_DUE_BY_TIME,
    IS_HALTED,
    IS_IN_LINE,
    IS_INCOMING,
    IS_OVER,
    IS_PAUSED,
    IS_RUNNING,
)
from cyclone_sqla.statements import ID, StatementSet, predicate, word

MOST_GROUPS = 200
"""How many pairs of kind and priority are told apart among the available jobs of all queues."""

MOST_ENTRIES = 1_000
"""How many workers, paused queues or entries of one history are read."""


class InspectionStatements(StatementSet):
    """The statements of those who look, for one schema in one database's words."""

    # ---- one job ---------------------------------------------------------------------------------

    @cached_property
    def job_facts(self) -> Any:
        """All that an explanation needs to know of a job, and the time."""
        return self._facts.where(self.job.c.id == bindparam("job_id", type_=BigInteger()))

    @cached_property
    def head_facts(self) -> Any:
        """The same of the job that has the place of a sequence's head."""
        key = bindparam("key", type_=Text())
        return self._facts.where(self.job.c.sequence_key == key, self.job.c.admitted.is_not(None))

    @property
    def _facts(self) -> sa.Select[Any]:
        job = self.job.c
        names = (
            "id", "kind", "queue", "priority", "state", "waits_for", "sequence_key", "position",
            "sequence_open", "admitted", "run_at", "attempt", "max_attempts", "snoozes", "worker",
            "leased_until", "cancel_requested_at", "dead_letter", "last_error", "updated_at",
            "started_at", "failed_at", "finished_at",
        )  # fmt: skip
        return select(*(job[name] for name in names), self.now().label("now"))

    @cached_property
    def last_act(self) -> Any:
        """Which person did this last to a job, and when: a run's end is no act of a person."""
        entry = self.tables.history
        return (
            select(entry.c.at, entry.c.actor)
            .where(
                entry.c.job_id == bindparam("job_id", type_=BigInteger()),
                entry.c.event == bindparam("event", type_=Text()),
                entry.c.worker.is_(None),
            )
            .order_by(entry.c.id.desc())
            .limit(1)
        )

    @cached_property
    def history(self) -> Any:
        """What is written down of a job, the latest first."""
        entry = self.tables.history
        names = ("at", "event", "attempt", "worker", "actor", "error", "details")
        return (
            select(*(entry.c[name] for name in names))
            .where(entry.c.job_id == bindparam("job_id", type_=BigInteger()))
            .order_by(entry.c.id.desc())
            .limit(MOST_ENTRIES)
        )

    @cached_property
    def at_position(self) -> Any:
        """The job at a position of a sequence."""
        job = self.job
        return select(job.c.id).where(
            job.c.sequence_key == bindparam("key", type_=Text()),
            job.c.position == bindparam("position", type_=BigInteger()),
        )

    # ---- its sequence ----------------------------------------------------------------------------

    @cached_property
    def ahead_in_line(self) -> Any:
        """How many jobs of a sequence come before a place in its order, up to a bound.

        In one with positions a job that has none is not counted: nobody waits for it.
        """
        job, place = self.job, func.coalesce(self.job.c.position, self.job.c.id)
        line = (
            select(job.c.id)
            .where(
                job.c.sequence_key == bindparam("key", type_=Text()),
                job.c.sequence_open.is_not(None),
                place < bindparam("place", type_=BigInteger()),
                sa.or_(
                    job.c.position.is_not(None),
                    bindparam("has_positions", type_=sa.Boolean()).is_(sa.false()),
                ),
            )
            .order_by(place)
            .limit(at_most(MOST_COUNTED))
        )
        return select(func.count()).select_from(line.subquery("line"))

    @cached_property
    def sequence(self) -> Any:
        """What is known of a sequence beyond its jobs."""
        sequence = self.tables.sequence
        return select(
            sequence.c.paused_at, sequence.c.paused_by, sequence.c.released_through
        ).where(sequence.c.key == bindparam("key", type_=Text()))

    @cached_property
    def positions_after(self) -> Any:
        """The next positions of a sequence that have a job, up to a bound."""
        job = self.job
        return (
            select(job.c.position)
            .where(
                predicate(HAS_POSITION),
                job.c.sequence_key == bindparam("key", type_=Text()),
                job.c.position > bindparam("after", type_=BigInteger()),
            )
            .order_by(job.c.position)
            .limit(at_most(MOST_COUNTED))
        )

    # ---- queues and workers ----------------------------------------------------------------------

    @cached_property
    def queue(self) -> Any:
        """Whether a queue is paused."""
        queue = self.tables.queue
        return select(queue.c.paused_at, queue.c.paused_by).where(
            queue.c.name == bindparam("queue", type_=Text())
        )

    @cached_property
    def paused_queues(self) -> Any:
        """The queues that are paused."""
        queue = self.tables.queue
        return (
            select(queue.c.name, queue.c.paused_at, queue.c.paused_by)
            .where(queue.c.paused_at.is_not(None))
            .order_by(queue.c.name)
            .limit(MOST_ENTRIES)
        )

    @cached_property
    def workers(self) -> Any:
        """The records of workers, and the time."""
        worker = self.tables.worker
        return select(worker, self.now().label("now")).order_by(worker.c.id).limit(MOST_ENTRIES)

    @cached_property
    def slots_in_use(self) -> Any:
        """How many jobs of each queue each worker runs."""
        job = self.job
        running = (
            select(job.c.worker, job.c.queue)
            .where(predicate(IS_RUNNING))
            .order_by(job.c.leased_until)
            .limit(at_most(WINDOW))
            .subquery("running")
        )
        count = func.count().label("number")
        return select(running.c.worker, running.c.queue, count).group_by(
            running.c.worker, running.c.queue
        )

    @cached_property
    def ahead_in_queue(self) -> Any:
        """How many available jobs of a queue and kind a claim takes before a job, up to a bound."""
        job = self.job
        priority = bindparam("priority", type_=sa.SmallInteger())
        place = sa.tuple_(priority, bindparam("job_id", type_=BigInteger()))
        line = (
            select(job.c.id)
            .where(
                predicate(IS_AVAILABLE),
                job.c.queue == bindparam("queue", type_=Text()),
                job.c.kind == bindparam("kind", type_=Text()),
                sa.tuple_(job.c.priority, job.c.id) < place,
            )
            .order_by(job.c.priority, job.c.id)
            .limit(at_most(MOST_COUNTED))
        )
        return select(func.count()).select_from(line.subquery("line"))

    @cached_property
    def available(self) -> Any:
        """The available jobs by queue, kind and priority: since when the first of each could have
        run, and how many there are, up to a bound.

        It leaps from the first of one group to the first of the next: a wall of jobs costs what
        one job costs.
        """
        job = self.job
        first = job.alias("first")
        leap = select(self._first_available(None).label("id")).cte("leap", recursive=True)
        after = self._first_available(first)
        rest = (
            select(after.label("id"))
            .select_from(leap.join(first, first.c.id == leap.c.id))
            .where(leap.c.id.is_not(None))
        )
        leap = leap.union_all(rest)
        groups = (
            select(leap.c.id).where(leap.c.id.is_not(None)).limit(MOST_GROUPS).subquery("found")
        )
        return select(
            job.c.queue,
            job.c.kind,
            job.c.run_at.label("since"),
            self._size_of_group(job).label("number"),
        ).select_from(groups.join(job, job.c.id == groups.c.id))

    def _first_available(self, after: Any) -> ColumnElement[Any]:
        """The id of the first job of the first group, or of the group after a job's."""
        job = self.job.alias("candidate")
        group = (job.c.queue, job.c.kind, job.c.priority)
        first = select(job.c.id).where(job.c.state == word(State.AVAILABLE))
        if after is not None:
            beyond = sa.tuple_(after.c.queue, after.c.kind, after.c.priority)
            first = first.where(sa.tuple_(*group) > beyond).correlate(after)
        return first.order_by(*group, job.c.id).limit(1).scalar_subquery()

    def _size_of_group(self, of: Any) -> ColumnElement[Any]:
        job = self.job.alias("member")
        members = (
            select(job.c.id)
            .where(
                job.c.state == word(State.AVAILABLE),
                job.c.queue == of.c.queue,
                job.c.kind == of.c.kind,
                # Not =, which would let any index that is in the order of ids serve.
                job.c.priority.between(of.c.priority, of.c.priority),
            )
            .order_by(job.c.priority, job.c.id)
            .limit(at_most(WINDOW))
            .correlate(of)
            .subquery("members")
        )
        return select(func.count()).select_from(members).correlate(of).scalar_subquery()

    @cached_property
    def windows(self) -> Any:
        """Every job that is not available, counted by queue and state in windows of bounded size.

        Together the windows hold each of them once, if those of ``line`` and ``debt`` are counted
        as :func:`~cyclone_sqla.inspection.counts_of` does.
        """
        job = self.job
        line = (job.c.sequence_key, func.coalesce(job.c.position, job.c.id))
        windows = [
            self._window("running", predicate(IS_RUNNING), job.c.leased_until),
            self._window("paused", predicate(IS_PAUSED), job.c.id),
            self._window("due", predicate(IS_DUE_BY_TIME), job.c.run_at),
            self._window("incoming", predicate(IS_INCOMING), job.c.id),
            self._window("line", predicate(IS_IN_LINE), *line),
            self._window("debt", predicate(IS_DEBT), job.c.id),
            self._window("dead", predicate(IS_DEAD_LETTER), job.c.finished_at),
            *(
                self._window(
                    state,
                    sa.and_(predicate(IS_OVER), job.c.state == word(state)),
                    job.c.finished_at,
                )
                for state in TERMINAL
            ),
        ]
        return sa.union_all(*windows)

    def _window(self, name: str, which: ColumnElement[bool], *order: ColumnElement[Any]) -> Any:
        job = self.job
        rows = (
            select(job.c.queue, job.c.state, job.c.waits_for, job.c.dead_letter)
            .where(which)
            .order_by(*order)
            .limit(at_most(WINDOW))
            .subquery(f"window_{name}")
        )
        columns = (rows.c.queue, rows.c.state, rows.c.waits_for, rows.c.dead_letter)
        counted: Any = select(word(name).label("part"), *columns, func.count().label("number"))
        return counted.group_by(*columns)

    # ---- sequences -------------------------------------------------------------------------------

    @cached_property
    def keys_in_line(self) -> Any:
        """The keys of sequences that have jobs, after a key: it leaps from each to the next."""
        after = bindparam("after", type_=Text())
        leap = select(self._next_key(after, None).label("key")).cte("leap", recursive=True)
        rest = select(self._next_key(leap.c.key, leap).label("key")).where(leap.c.key.is_not(None))
        leap = leap.union_all(rest)
        limit = bindparam("limit", type_=sa.Integer())
        return select(leap.c.key).where(leap.c.key.is_not(None)).limit(limit)

    def _next_key(self, after: ColumnElement[Any], outer: Any) -> ColumnElement[Any]:
        job = self.job.alias("in_line")
        following = select(job.c.sequence_key).where(
            job.c.sequence_open.is_not(None), job.c.sequence_key > after
        )
        if outer is not None:
            following = following.correlate(outer)
        return following.order_by(job.c.sequence_key).limit(1).scalar_subquery()

    @cached_property
    def paused_keys(self) -> Any:
        """The keys of paused sequences, after a key."""
        sequence = self.tables.sequence
        return (
            select(sequence.c.key)
            .where(
                sequence.c.paused_at.is_not(None),
                sequence.c.key > bindparam("after", type_=Text()),
            )
            .order_by(sequence.c.key)
            .limit(at_most(bindparam("limit", type_=sa.Integer())))
        )

    @cached_property
    def lines(self) -> Any:
        """For each key its head, how many jobs are in line (bounded), and what is known of it."""
        given, sequence = self.syntax.rows("keys", KEYS), self.tables.sequence
        job = self.job.alias("head")
        head = (
            select(job.c.id)
            .where(job.c.sequence_key == given.c.key, job.c.admitted.is_not(None))
            .limit(1)
            .correlate(given)
            .scalar_subquery()
        )
        return select(
            given.c.key,
            head.label("head"),
            self._in_line(given.c.key, given).label("number"),
            sequence.c.paused_at,
            sequence.c.paused_by,
            sequence.c.released_through,
        ).select_from(given.outerjoin(sequence, sequence.c.key == given.c.key))

    @cached_property
    def heads(self) -> Any:
        """The facts of given jobs."""
        given = self.syntax.rows("wanted", ID)
        return self._facts.where(self.syntax.one_of(self.job.c.id, select(given.c.id)))

    @cached_property
    def halted(self) -> Any:
        """The heads that halt their sequences, after a job, and how many jobs are in their lines
        (bounded, themselves included).
        """
        job, entry = self.job, self.tables.history
        actor = (
            select(entry.c.actor)
            .where(
                job.c.cancel_requested_at.is_not(None),
                entry.c.job_id == job.c.id,
                entry.c.event == word("cancel"),
                entry.c.worker.is_(None),
            )
            .order_by(entry.c.id.desc())
            .limit(1)
            .correlate(job)
            .scalar_subquery()
        )
        columns = (job.c.id, job.c.kind, job.c.state, job.c.sequence_key, job.c.finished_at)
        return (
            select(
                *columns,
                job.c.last_error,
                actor.label("actor"),
                self._in_line(job.c.sequence_key, job).label("number"),
            )
            .where(predicate(IS_HALTED), job.c.id > bindparam("after", type_=BigInteger()))
            .order_by(job.c.id)
            .limit(at_most(bindparam("limit", type_=sa.Integer())))
        )

    @cached_property
    def halted_count(self) -> Any:
        """How many sequences are halted, up to a bound."""
        job = self.job
        halted = (
            select(job.c.id).where(predicate(IS_HALTED)).order_by(job.c.id).limit(at_most(WINDOW))
        )
        return select(func.count()).select_from(halted.subquery("halted"))

    def _in_line(self, key: ColumnElement[Any], outer: Any) -> ColumnElement[Any]:
        job = self.job.alias("in_line")
        line = (
            select(job.c.id)
            .where(job.c.sequence_key == key, job.c.sequence_open.is_not(None))
            .order_by(func.coalesce(job.c.position, job.c.id))
            .limit(at_most(MOST_COUNTED + 1))
            .correlate(outer)
            .subquery("line")
        )
        return select(func.count()).select_from(line).correlate(outer).scalar_subquery()

    # ---- jobs by a filter ------------------------------------------------------------------------

    def pick(self, wanted: JobFilter, states: tuple[State, ...]) -> Any:
        """The jobs in these states that a filter means, after a job, by id."""
        job = self.job
        return (
            select(
                job.c.id,
                job.c.kind,
                job.c.queue,
                job.c.state,
                job.c.unique_key,
                job.c.sequence_open,
                job.c.dead_letter,
            )
            .where(
                *conditions(job.c, wanted),
                job.c.state.in_([word(state) for state in states]),
                job.c.id > bindparam("after", type_=BigInteger()),
            )
            .order_by(job.c.id)
            .limit(at_most(bindparam("limit", type_=sa.Integer())))
        )

    @cached_property
    def lock(self) -> Any:
        """Those of the given jobs that could be locked."""
        given, job = self.syntax.rows("wanted", ID), self.job.alias("wanted_job")
        picked: Any = (
            select(job.c.id)
            .where(self.syntax.one_of(job.c.id, select(given.c.id)))
            .order_by(job.c.id)
        )
        locked = self.syntax.locked(picked, job, "locked")
        return select(locked.c.id)


def at_most(rows: int | ColumnElement[int]) -> ColumnElement[Any]:
    """A limit that PostgreSQL can't see through, so that it plans for a small part of the rows.

    Where it sees a limit that is larger than the rows which its statistics know of, it reads and
    sorts all there are.
    """
    return select(sa.literal(rows) if isinstance(rows, int) else rows).scalar_subquery()


def conditions(of: Any, wanted: JobFilter) -> list[ColumnElement[bool]]:
    """What a filter asks of a job's columns, which are attributes of ``of``."""
    equal = {
        "queue": wanted.queue,
        "kind": wanted.kind,
        "tenant": wanted.tenant,
        "sequence_key": wanted.sequence,
    }
    asked = [getattr(of, name) == value for name, value in equal.items() if value is not None]
    return [*asked, *_of_state(of, wanted), *_of_times(of, wanted)]


def _of_state(of: Any, wanted: JobFilter) -> Iterator[ColumnElement[bool]]:
    if wanted.dead_letter is not None:
        yield of.dead_letter.is_not(None) if wanted.dead_letter else of.dead_letter.is_(None)
    if wanted.state is not None:
        yield of.state == word(wanted.state)
        if wanted.sequence is not None and not State(wanted.state).is_terminal:
            # Always so, and said for the sake of the index of those in line.
            yield of.sequence_open.is_not(None)


def _of_times(of: Any, wanted: JobFilter) -> Iterator[ColumnElement[bool]]:
    if wanted.created_before is not None:
        yield of.created_at < wanted.created_before
    if wanted.created_after is not None:
        yield of.created_at > wanted.created_after

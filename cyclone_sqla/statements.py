"""Every statement of a job's life, as SQLAlchemy Core, built once for a dialect and schema.

This module builds and never executes. A state stands in a statement as a literal, never as a bound
value: a generic plan can't use a partial index with a bound state, and ``ON CONFLICT … WHERE state
IN (bound)`` finds no index any more once psycopg has prepared it. What databases do differently
comes through :class:`Syntax`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy import BigInteger, ColumnElement, Text, bindparam, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from cyclone_sqla import lifecycle as life
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.lifecycle import State, Transition, WaitsFor
from cyclone_sqla.models import (
    HOLDS_UNIQUE_KEY,
    IS_AVAILABLE,
    IS_DEAD_LETTER,
    IS_DEBT,
    IS_DUE_BY_TIME,
    IS_HELD_BACK,
    IS_INCOMING,
    IS_OVER,
    IS_RUNNING,
    Duration,
    JsonText,
    Tables,
    Timestamp,
)

Columns = Mapping[str, sa.types.TypeEngine[Any]]

LEASED: Columns = {"id": BigInteger(), "lease": BigInteger()}
"""A run, named as every write to it names it."""

COMPLETED: Columns = {**LEASED, "result": Text()}

RELEASED: Columns = {
    **LEASED,
    "state": Text(),
    "waits_for": Text(),
    "delay": Duration(),
    "attempts_returned": sa.Integer(),
    "snoozed": sa.Integer(),
    "crashed": sa.Integer(),
    "failed": sa.Boolean(),
    "error": Text(),
}

ENTRY: Columns = {
    "job_id": BigInteger(),
    "event": Text(),
    "attempt": sa.Integer(),
    "lease": BigInteger(),
    "worker": Text(),
    "actor": Text(),
    "error": Text(),
    "details": Text(),
}

ID: Columns = {"id": BigInteger()}

KEY: Columns = {"of_kind": Text(), "key": Text()}

TAKEN_KEY: Columns = {**KEY, "queue": Text()}

NAMED_KEY: Columns = {**KEY, "job_id": BigInteger()}

NEW_JOB: Columns = {
    "kind": Text(),
    "queue": Text(),
    "priority": sa.SmallInteger(),
    "arguments": Text(),
    "headers": Text(),
    "unique_key": Text(),
    "sequence_key": Text(),
    "position": BigInteger(),
    "on_failure": Text(),
    "process_at": Timestamp(),
    "delay": Duration(),
    "deadline": Timestamp(),
    "timeout": Duration(),
    "max_attempts": sa.Integer(),
    "origin": Text(),
    "tenant": Text(),
    "trace_id": Text(),
}

PLAIN_JOB = ("kind", "queue", "priority", "arguments", "max_attempts", "origin")
"""The columns of :data:`NEW_JOB` that every job fills."""

NUMBERED_JOB: Columns = {"id": BigInteger(), **NEW_JOB}


class NewJob(NamedTuple):
    """A row of :data:`NUMBERED_JOB`. ``rest`` is one mapping for neighbours that are alike."""

    id: int
    arguments: str
    rest: Mapping[str, Any]


class Syntax(Protocol):
    """What a database says in its own words."""

    @property
    def code_points(self) -> str:
        """The collation that orders text as Python does, so that both may sort one list."""
        ...

    def now(self) -> ColumnElement[Any]:
        """The present time, as one expression that an index condition can use."""
        ...

    def rows(self, name: str, columns: Columns) -> sa.FromClause:
        """A list of rows that is given as parameters."""
        ...

    def bind(self, name: str, columns: Columns, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The parameters for :meth:`rows`."""
        ...

    def jobs(self, name: str, columns: Columns) -> sa.FromClause:
        """The same for new jobs, of which there may be very many."""
        ...

    def bind_jobs(self, name: str, columns: Columns, jobs: Iterable[NewJob]) -> dict[str, Any]:
        """The parameters for :meth:`jobs`."""
        ...

    def ids_by_state(self, insert: Any) -> Any:
        """What an INSERT returns, each job's id and state, in as few rows as can be."""
        ...

    def states_of(self, rows: Sequence[Any]) -> dict[int, str]:
        """The rows of :meth:`ids_by_state`, by id."""
        ...

    def one_of(self, column: ColumnElement[Any], ids: sa.Select[Any]) -> ColumnElement[bool]:
        """Whether the column is one of few ids, to be looked up one by one."""
        ...

    def json(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        """JSON text as a value of the column type."""
        ...

    def locked(
        self, picked: sa.Select[Any], job: sa.FromClause, name: str, *, to_delete: bool = False
    ) -> sa.FromClause:
        """The picked rows of ``job``, locked in their order; those that others have locked are left
        out.
        """
        ...

    def insert_unless_held(self, table: sa.Table, source: sa.Select[Any]) -> Any:
        """An INSERT of ``source`` that skips rows with a key that a unique index holds."""
        ...

    def upsert(self, table: sa.Table, key: dict[str, Any], values: dict[str, Any]) -> Any:
        """Write a row under its primary key, new or not."""
        ...


def word(value: str) -> ColumnElement[str]:
    """One of the library's own words as an SQL literal."""
    return sa.literal_column(f"'{value}'", Text())


def predicate(sql: str) -> ColumnElement[bool]:
    """An index's own predicate, to the letter.

    Without a type: of a Boolean, SQLAlchemy makes ``(…) = 1`` on SQLite, which fits no index.
    """
    return sa.literal_column(f"({sql})")


class StatementSet:
    """Statements for one schema in one database's words, each built at its first use."""

    def __init__(self, tables: Tables, syntax: Syntax) -> None:
        self.tables = tables
        self.syntax = syntax
        self.job = tables.job
        self.now = syntax.now


class Statements(StatementSet):
    """Those of a job's life."""

    # ---- enqueue ---------------------------------------------------------------------------------

    @cached_property
    def insert_plain(self) -> Any:
        """One job of which nothing is asked but to run: of few values, and so in less time."""
        clock = select(self.now().label("now")).subquery("clock")
        given = {name: bindparam(name, type_=NEW_JOB[name]) for name in PLAIN_JOB}
        values: dict[str, ColumnElement[Any]] = {
            **given,
            "arguments": self.syntax.json(given["arguments"]),
            "state": word(State.AVAILABLE),
            **dict.fromkeys(("run_at", "created_at", "updated_at"), clock.c.now),
        }
        columns = (value.label(name) for name, value in values.items())
        return self._returning(self._insert(select(*columns).select_from(clock)))

    @cached_property
    def insert_one(self) -> Any:
        """One job from bound values, without a key that may be held."""
        return self._returning(self._insert(self._one_job()))

    @cached_property
    def insert_one_unless_held(self) -> Any:
        """One job; no row comes back if an active job holds its unique key."""
        return self._returning(self._insert_unless_held(self._one_job()))

    @cached_property
    def insert_many(self) -> Any:
        """Jobs whose ids were drawn before, in (kind, unique key) order."""
        return self._telling_states(self._insert(self._many_jobs(NUMBERED_JOB)))

    @cached_property
    def insert_many_unless_held(self) -> Any:
        """The same, skipping those whose unique key is held."""
        return self._telling_states(self._insert_unless_held(self._many_jobs(NUMBERED_JOB)))

    @cached_property
    def holders(self) -> Any:
        """The active jobs that hold the given (kind, unique key) pairs."""
        job, wanted = self.job, self.syntax.rows("keys", KEY)
        columns = (job.c.id, job.c.kind, job.c.queue, job.c.state, job.c.unique_key)
        return select(*columns).where(
            job.c.kind == wanted.c.of_kind,
            job.c.unique_key == wanted.c.key,
            predicate(HOLDS_UNIQUE_KEY),
        )

    def _one_job(self) -> sa.Select[Any]:
        return self._new_job(
            {name: bindparam(name, type_=type_) for name, type_ in NEW_JOB.items()}
        )

    def _many_jobs(self, columns: Columns) -> sa.Select[Any]:
        rows = self.syntax.jobs("jobs", columns)
        collation = self.syntax.code_points
        order = (rows.c.kind.collate(collation), rows.c.unique_key.collate(collation), rows.c.id)
        return self._new_job(rows.c, rows).order_by(*order)

    def _new_job(
        self, given: Mapping[str, Any] | Any, rows: sa.FromClause | None = None
    ) -> sa.Select[Any]:
        """What a new row holds: its due time and state follow from one reading of the clock."""
        clock = select(self.now().label("now")).subquery("clock")
        now = clock.c.now
        run_at = func.coalesce(
            given["process_at"], plus(now, given["delay"]), now, type_=Timestamp()
        )
        is_delayed, is_sequenced = run_at > now, given["sequence_key"].is_not(None)
        values = {
            "kind": given["kind"],
            "queue": given["queue"],
            "priority": given["priority"],
            "state": sa.case(
                (sa.or_(is_sequenced, is_delayed), word(State.PENDING)),
                else_=word(State.AVAILABLE),
            ),
            "waits_for": sa.case(
                (is_sequenced, word(WaitsFor.ADMISSION)), (is_delayed, word(WaitsFor.TIME))
            ),
            "arguments": self.syntax.json(given["arguments"]),
            "headers": self.syntax.json(given["headers"]),
            "unique_key": given["unique_key"],
            "sequence_key": given["sequence_key"],
            "position": given["position"],
            "sequence_open": sa.case((is_sequenced, sa.true())),
            "on_failure": given["on_failure"],
            "run_at": run_at,
            "deadline": given["deadline"],
            "timeout": given["timeout"],
            "max_attempts": given["max_attempts"],
            "origin": given["origin"],
            "tenant": given["tenant"],
            "trace_id": given["trace_id"],
            "created_at": now,
            "updated_at": now,
        }
        if "id" in given:
            values["id"] = given["id"]
        source = clock if rows is None else rows.join(clock, sa.true())
        return select(*(value.label(name) for name, value in values.items())).select_from(source)

    def _insert(self, source: sa.Select[Any]) -> Any:
        return sa.insert(self.job).from_select(list(source.selected_columns.keys()), source)

    def _insert_unless_held(self, source: sa.Select[Any]) -> Any:
        """Whatever unique index is in the way: the unique key's, or that of positions."""
        return self.syntax.insert_unless_held(self.job, source)

    def _returning(self, insert: Any) -> Any:
        return insert.returning(self.job.c.id, self.job.c.state)

    def _telling_states(self, insert: Any) -> Any:
        return self.syntax.ids_by_state(self._returning(insert))

    # ---- idempotency keys ------------------------------------------------------------------------

    @cached_property
    def take_keys(self) -> Any:
        """Take keys, in one order; those that come back were free."""
        key, given = self.tables.idempotency_key, self.syntax.rows("keys", TAKEN_KEY)
        columns: list[ColumnElement[Any]] = [
            given.c.of_kind.label("kind"),
            given.c.key.label("key"),
            given.c.queue.label("queue"),
            self.now().label("created_at"),
        ]
        source = select(*columns).order_by(given.c.of_kind, given.c.key)
        insert = self.syntax.insert_unless_held(key, source)
        return insert.returning(key.c.kind, key.c.key)

    @cached_property
    def jobs_of_keys(self) -> Any:
        """The first job of each key, with its state if it is still there."""
        key, job = self.tables.idempotency_key, self.job
        wanted = self.syntax.rows("keys", KEY)
        return (
            select(key.c.kind, key.c.key, key.c.job_id, key.c.queue, job.c.state)
            .select_from(wanted)
            .join(key, sa.and_(key.c.kind == wanted.c.of_kind, key.c.key == wanted.c.key))
            .outerjoin(job, job.c.id == key.c.job_id)
        )

    @cached_property
    def name_keys(self) -> Any:
        """Tie keys just taken to their jobs."""
        key, given = self.tables.idempotency_key, self.syntax.rows("keys", NAMED_KEY)
        return (
            sa.update(key)
            .where(key.c.kind == given.c.of_kind, key.c.key == given.c.key)
            .values(job_id=given.c.job_id)
        )

    @cached_property
    def give_back_keys(self) -> Any:
        """Give back keys just taken in the same transaction."""
        key, given = self.tables.idempotency_key, self.syntax.rows("keys", KEY)
        return sa.delete(key).where(
            sa.tuple_(key.c.kind, key.c.key).in_(select(given.c.of_kind, given.c.key))
        )

    @cached_property
    def old_idempotency_key(self) -> Any:
        """Whether there is a key older than its retention."""
        return self._old_keys(self.tables.idempotency_key.c.kind).limit(1)

    @cached_property
    def prune_idempotency_keys(self) -> Any:
        """Forget keys older than their retention."""
        key = self.tables.idempotency_key
        old = self._old_keys(key.c.kind, key.c.key).limit(bindparam("limit", type_=sa.Integer()))
        return sa.delete(key).where(sa.tuple_(key.c.kind, key.c.key).in_(old))

    def _old_keys(self, *columns: ColumnElement[Any]) -> Any:
        key = self.tables.idempotency_key
        oldest_kept = minus(self.now(), bindparam("age", type_=Duration()))
        return select(*columns).where(key.c.created_at < oldest_kept).order_by(key.c.created_at)

    # ---- look ------------------------------------------------------------------------------------

    @cached_property
    def outlook(self) -> Any:
        """What lies ahead, in one look: how long until the next delayed or retrying job is due
        (zero or less: now), whether jobs are incoming, whether released heads owe a hand-over,
        whether a head is held back though its sequence is not paused.
        """
        job = self.job
        due = (
            select(minus_time(job.c.run_at, self.now()))
            .where(predicate(IS_DUE_BY_TIME))
            .order_by(job.c.run_at)
            .limit(1)
            .scalar_subquery()
        )
        held_back = sa.and_(predicate(IS_HELD_BACK), ~self.is_paused_sequence(job))
        return select(
            sa.type_coerce(due, Duration()).label("due_in"),
            self._is_any(predicate(IS_INCOMING)).label("has_incoming"),
            self._is_any(predicate(IS_DEBT)).label("has_debts"),
            self._is_any(held_back).label("has_held_back"),
        )

    def _is_any(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        """Whether such a job is there.

        Not EXISTS: with statistics that make such jobs seem frequent, it reads the table for one.
        """
        job = self.job
        first = select(job.c.id).where(condition).order_by(job.c.id).limit(1)
        return first.scalar_subquery().is_not(None)

    @cached_property
    def running_of(self) -> Any:
        """What a worker holds, by the database's account."""
        return select(self.job.c.id, self.job.c.lease, self.job.c.queue).where(
            predicate(IS_RUNNING), self.job.c.worker == bindparam("worker")
        )

    @cached_property
    def expired(self) -> Any:
        """Running jobs whose lease has run out, longest first."""
        return self.running.where(self.job.c.leased_until <= self.now())

    @cached_property
    def running(self) -> Any:
        """Running jobs, whoever holds them."""
        job = self.job
        return (
            select(
                job.c.id,
                job.c.kind,
                job.c.queue,
                job.c.lease,
                job.c.worker,
                job.c.attempt,
                job.c.max_attempts,
                job.c.snoozes,
                job.c.crashes,
            )
            .where(predicate(IS_RUNNING))
            .order_by(job.c.leased_until)
            .limit(bindparam("limit", type_=sa.Integer()))
        )

    @cached_property
    def running_under(self) -> Any:
        """Running jobs that a worker of this name holds."""
        return self.running.where(self.job.c.worker == bindparam("worker"))

    @cached_property
    def leases_of(self) -> Any:
        """The present lease and state of given jobs."""
        job, wanted = self.job, self.syntax.rows("wanted", ID)
        columns = (job.c.id, job.c.lease, job.c.state, job.c.cancel_requested_at)
        return select(*columns).where(job.c.id == wanted.c.id)

    @cached_property
    def present(self) -> Any:
        """The present time."""
        return select(sa.type_coerce(self.now(), Timestamp()))

    # ---- stage -----------------------------------------------------------------------------------

    @cached_property
    def stage(self) -> Any:
        """Delayed and retrying jobs whose time has come become available."""
        job = self.job.alias("due")
        due = (
            select(job.c.id)
            .where(predicate(IS_DUE_BY_TIME), job.c.run_at <= self.now())
            .order_by(job.c.run_at)
            .limit(bindparam("limit", type_=sa.Integer()))
        )
        picked = self.syntax.locked(due, job, "picked")
        return (
            sa.update(self.job)
            .where(self.job.c.id == picked.c.id)
            .values(self._staged())
            .returning(self.job.c.queue, self.job.c.state)
        )

    def _staged(self) -> dict[str, Any]:
        """The head of a paused sequence goes on waiting, for its turn."""
        job, is_paused = self.job, self.is_paused_sequence(self.job)
        ready = self._becomes(life.STAGE)
        return {
            "state": sa.case((is_paused, job.c.state), else_=ready["state"]),
            "waits_for": sa.case((is_paused, word(WaitsFor.TURN)), else_=ready["waits_for"]),
            "updated_at": self.now(),
        }

    def is_paused_sequence(self, job: Any) -> ColumnElement[bool]:
        """Whether the job's sequence is paused."""
        sequence = self.tables.sequence
        return sa.exists().where(
            sequence.c.key == job.c.sequence_key, sequence.c.paused_at.is_not(None)
        )

    # ---- claim: the pick is each dialect's own ---------------------------------------------------

    def claim_values(self, lease: ColumnElement[Any]) -> dict[str, Any]:
        """What a claim writes: the attempt counts now, before any user code."""
        return {
            **self._becomes(life.CLAIM),
            "attempt": self.job.c.attempt + 1,
            "lease": lease,
            "leased_until": plus(self.now(), bindparam("lease_length", type_=Duration())),
            "worker": bindparam("claimed_by", type_=Text()),
            "started_at": self.now(),
            "updated_at": self.now(),
        }

    def claim_this(self, lease: ColumnElement[Any]) -> Any:
        """One available job, by its id."""
        job = self.job
        return (
            sa.update(job)
            .where(
                job.c.id == bindparam("job_id", type_=BigInteger()),
                predicate(IS_AVAILABLE),
                self.may_start(job),
                self.not_paused(job.c.queue),
            )
            .values(self.claim_values(lease))
            .returning(*self.claimed)
        )

    @property
    def claimed(self) -> tuple[ColumnElement[Any], ...]:
        """The fields of a :class:`ClaimedJob`; the deadline is judged by the claim's own clock.

        As the driver gives it: not every claim is answered through SQLAlchemy's types.
        """
        job = self.job.c
        others = {
            "headers_json": sa.type_coerce(job.headers, JsonText()).label("headers_json"),
            "time_left": minus_time(job.deadline, self.now()).label("time_left"),
        }
        return tuple(others[n] if n in others else job[n] for n in ClaimedJob._fields)

    def may_start(self, job: Any) -> ColumnElement[bool]:
        """False in a paused sequence: asked inside the claim too, since a head can be made ready by
        a transaction that does not see a pause which is committed before it.
        """
        sequence = self.tables.sequence.alias("of_job")
        is_paused = (
            sa.exists()
            .where(sequence.c.key == job.c.sequence_key, sequence.c.paused_at.is_not(None))
            .correlate(job)
        )
        return sa.or_(job.c.sequence_key.is_(None), ~is_paused)

    def not_paused(self, queue: ColumnElement[Any]) -> ColumnElement[bool]:
        """True for a queue that nobody has paused: asked inside the claim itself."""
        paused = self.tables.queue
        return ~sa.exists().where(paused.c.name == queue, paused.c.paused_at.is_not(None))

    # ---- renew -----------------------------------------------------------------------------------

    @cached_property
    def renew(self) -> Any:
        """Lengthen the leases that are still held; says which runs were asked to stop, and when.

        The time itself comes back: in RETURNING, SQLite 3.40 says of a NULL column that it IS NOT
        NULL.
        """
        picked = self._held("held", LEASED)
        job = self.job
        return (
            sa.update(job)
            .where(job.c.id == picked.c.id)
            .values(leased_until=plus(self.now(), bindparam("lease_length", type_=Duration())))
            .returning(job.c.id, job.c.lease, job.c.cancel_requested_at)
        )

    # ---- settle ----------------------------------------------------------------------------------

    @cached_property
    def wait_for(self) -> Any:
        """Lock a job's row, behind whoever has it: the one statement that waits."""
        wanted = bindparam("id", type_=BigInteger())
        return select(self.job.c.id).where(self.job.c.id == wanted).with_for_update(key_share=True)

    @cached_property
    def complete(self) -> Any:
        """The hot path: runs whose action returned, and that nobody asked to stop."""
        picked = self._held("done", COMPLETED, only_unasked=True)
        completed = self._completed(self.syntax.json(picked.c.result))
        return completed.where(self.job.c.id == picked.c.id).returning(*self._settled)

    @cached_property
    def complete_one(self) -> Any:
        """The same for one run, in two thirds of the time."""
        return self.completing_one().returning(*self._settled)

    def completing_one(self) -> sa.Update:
        """:attr:`complete_one`, without what it returns."""
        one = {name: bindparam(f"one_{name}", type_=type_) for name, type_ in COMPLETED.items()}
        job = self.job.alias("candidate")
        held = select(job.c.id).where(
            job.c.id == one["id"],
            job.c.lease == one["lease"],
            job.c.leased_until.is_not(None),
            job.c.cancel_requested_at.is_(None),
        )
        held = held.with_for_update(skip_locked=True, key_share=True)
        completed = self._completed(self.syntax.json(one["result"]))
        return completed.where(self.job.c.id == held.scalar_subquery())

    def _completed(self, result: ColumnElement[Any]) -> sa.Update:
        return sa.update(self.job).values(
            **self._becomes(life.COMPLETE),
            result=result,
            leased_until=None,
            finished_at=self.now(),
            updated_at=self.now(),
            sequence_open=None,
            admitted=None,
        )

    @cached_property
    def release(self) -> Any:
        """Every other end of a run: retry, snooze, discard, cancel, give back."""
        return self._release(self._held("ended", RELEASED))

    @cached_property
    def release_expired(self) -> Any:
        """The same for a lapsed lease: a run renewed or settled since is left alone."""
        return self._release(self._held("ended", RELEASED, only_expired=True))

    def _release(self, picked: sa.FromClause) -> Any:
        job, now = self.job, self.now()
        final = self._unless_cancelled(picked.c.state)
        is_over = final.in_([word(state) for state in life.TERMINAL])
        halts = sa.and_(final != word(State.COMPLETED), job.c.on_failure == word("halt"))
        is_dead = sa.and_(
            final == word(State.DISCARDED), job.c.on_failure.is_distinct_from(word("skip"))
        )
        return (
            sa.update(job)
            .where(job.c.id == picked.c.id)
            .values(
                state=final,
                waits_for=sa.case((job.c.cancel_requested_at.is_(None), picked.c.waits_for)),
                run_at=func.coalesce(plus(now, picked.c.delay), job.c.run_at, type_=Timestamp()),
                attempt=job.c.attempt - picked.c.attempts_returned,
                snoozes=job.c.snoozes + picked.c.snoozed,
                crashes=job.c.crashes + picked.c.crashed,
                last_error=func.coalesce(picked.c.error, job.c.last_error),
                failed_at=sa.case((picked.c.failed, now), else_=job.c.failed_at),
                dead_letter=sa.case((is_dead, sa.true())),
                leased_until=None,
                finished_at=sa.case((is_over, now)),
                updated_at=now,
                **self._leave_line(sa.or_(~is_over, halts)),
            )
            .returning(*self._settled)
        )

    @property
    def _settled(self) -> tuple[ColumnElement[Any], ...]:
        """What a settled row tells, its line included.

        Plain columns: in RETURNING, SQLite 3.40 takes ``sequence_open IS NULL`` for false, since a
        partial index says that it is not.
        """
        job = self.job.c
        return job.id, job.state, job.sequence_key, job.sequence_open, job.position

    def _leave_line(self, stays: ColumnElement[bool]) -> dict[str, Any]:
        """A head is released from its line, unless it stays at its place."""
        job = self.job
        return {
            "sequence_open": sa.case((stays, job.c.sequence_open)),
            "admitted": sa.case((stays, job.c.admitted)),
        }

    def _held(
        self,
        name: str,
        columns: Columns,
        *,
        only_expired: bool = False,
        only_unasked: bool = False,
    ) -> sa.FromClause:
        """The given runs whose lease still stands, locked.

        "Running" is asked as "has a lease" (a check constraint makes them one): asked by state, a
        plan made while few jobs ran walks the index of running jobs instead of the primary key.
        """
        given, job = self.syntax.rows(name, columns), self.job.alias("candidate")
        rest = [given.c[column] for column in columns if column not in ("id", "lease")]
        held = (
            select(job.c.id, *rest)
            .select_from(given)
            .join(job, job.c.id == given.c.id)
            .where(job.c.lease == given.c.lease, job.c.leased_until.is_not(None))
            .order_by(job.c.id)
        )
        if only_expired:
            held = held.where(job.c.leased_until <= self.now())
        if only_unasked:
            held = held.where(job.c.cancel_requested_at.is_(None))
        return self.syntax.locked(held, job, "picked")

    def _unless_cancelled(self, state: ColumnElement[Any]) -> ColumnElement[Any]:
        is_asked = self.job.c.cancel_requested_at.is_not(None)
        return sa.case((is_asked, word(State.CANCELLED)), else_=state)

    # ---- history ---------------------------------------------------------------------------------

    @cached_property
    def record(self) -> Any:
        """Write down what happened to jobs."""
        history, entries = self.tables.history, self.syntax.rows("entries", ENTRY)
        values: dict[str, ColumnElement[Any]] = {
            name: entries.c[name] for name in ENTRY if name != "details"
        }
        values["details"] = self.syntax.json(entries.c.details)
        values["at"] = self.now()
        source = select(*(value.label(name) for name, value in values.items()))
        return sa.insert(history).from_select(list(values), source)

    @cached_property
    def trim_history(self) -> Any:
        """Keep the latest entries of a job."""
        history = self.tables.history
        oldest_kept = (
            select(history.c.id)
            .where(history.c.job_id == bindparam("job_id"))
            .order_by(history.c.id.desc())
            .offset(bindparam("keep", type_=sa.Integer()))
            .limit(1)
            .scalar_subquery()
        )
        return sa.delete(history).where(
            history.c.job_id == bindparam("job_id"), history.c.id <= oldest_kept
        )

    # ---- prune -----------------------------------------------------------------------------------

    def prune(self, state: State, *, dead_letters: bool = False) -> Any:
        """Delete ended jobs of one state behind a place, the oldest first, a batch at a time."""
        job = self.job.alias("old")
        old = self._old_jobs(job, state, dead_letters).limit(bindparam("limit", type_=sa.Integer()))
        picked = self.syntax.locked(old, job, "picked", to_delete=True)
        return (
            sa.delete(self.job)
            .where(self.job.c.id.in_(select(picked.c.id)))
            .returning(self.job.c.id, self.job.c.finished_at)
        )

    def oldest_prunable(self, state: State, *, dead_letters: bool = False) -> Any:
        """The one that :meth:`prune` would delete first."""
        return self._old_jobs(self.job.alias("old"), state, dead_letters).limit(1)

    def _old_jobs(self, job: Any, state: State, dead_letters: bool) -> Any:
        after = bindparam("finished_at", type_=Timestamp())
        return (
            select(job.c.id, job.c.finished_at)
            .where(
                predicate(IS_DEAD_LETTER if dead_letters else IS_OVER),
                job.c.state == word(state),
                # A dead letter may halt its sequence, or owe its place: none would go on without.
                job.c.sequence_open.is_(None),
                job.c.admitted.is_(None),
                self._is_no_position_mark(job),
                job.c.finished_at < minus(self.now(), bindparam("age", type_=Duration())),
                # Not one comparison of pairs: the index ends at the time.
                job.c.finished_at >= after,
                sa.or_(
                    job.c.finished_at > after, job.c.id > bindparam("job_id", type_=BigInteger())
                ),
            )
            .order_by(job.c.finished_at, job.c.id)
        )

    def _is_no_position_mark(self, job: Any) -> ColumnElement[bool]:
        """A released position above a gap stays: it alone says that it is taken and over."""
        sequence = self.tables.sequence
        through = (
            select(sequence.c.released_through)
            .where(sequence.c.key == job.c.sequence_key)
            .correlate(job)
            .scalar_subquery()
        )
        return sa.or_(job.c.position.is_(None), job.c.position <= through)

    # ---- workers ---------------------------------------------------------------------------------

    @cached_property
    def beat(self) -> Any:
        """A worker says that it is alive."""
        worker = self.tables.worker
        return (
            sa.update(worker)
            .where(worker.c.id == bindparam("worker"))
            .values(seen_at=self.now())
            .returning(worker.c.id)
        )

    @cached_property
    def announce(self) -> Any:
        """A worker says who it is and what it serves."""
        worker = self.tables.worker
        given = ("id", "name", "host", "pid", "queues", "kinds")
        values: dict[str, Any] = {
            name: bindparam(name, type_=worker.c[name].type) for name in given
        }
        return sa.insert(worker).values(**values, started_at=self.now(), seen_at=self.now())

    @cached_property
    def withdraw(self) -> Any:
        """A worker says goodbye."""
        worker = self.tables.worker
        return sa.delete(worker).where(worker.c.id == bindparam("worker"))

    @cached_property
    def forget_workers(self) -> Any:
        """Drop the records of workers that were not heard of for long."""
        worker = self.tables.worker
        return sa.delete(worker).where(
            worker.c.seen_at < minus(self.now(), bindparam("age", type_=Duration()))
        )

    # ---- new states, from the table of transitions -----------------------------------------------

    def _becomes(self, transition: Transition) -> dict[str, Any]:
        waits_for = transition.waits_for
        return {
            "state": word(transition.target),
            "waits_for": sa.null() if waits_for is None else word(waits_for),
        }


def plus(time: ColumnElement[Any], duration: ColumnElement[Any]) -> ColumnElement[Any]:
    """A time later by a duration; NULL without one."""
    return _Later(time, duration)


def minus(time: ColumnElement[Any], duration: ColumnElement[Any]) -> ColumnElement[Any]:
    """A time earlier by a duration."""
    return _Earlier(time, duration)


def minus_time(later: ColumnElement[Any], earlier: ColumnElement[Any]) -> ColumnElement[Any]:
    """The duration between two times; NULL without one of them."""
    return sa.type_coerce(later.op("-")(earlier), Duration())


class _Later(FunctionElement[datetime]):
    """A time moved by a duration whose days have 24 hours, wherever the session's zone is: drivers
    send a timedelta as days and seconds, and a day of the zone may have 23 or 25.
    """

    inherit_cache = True
    type = Timestamp()
    sign = "+"


class _Earlier(_Later):
    inherit_cache = True
    sign = "-"


@compiles(_Later)
@compiles(_Earlier)
def _add(element: _Later, compiler: Any, **kw: Any) -> str:
    time, duration = (compiler.process(each, **kw) for each in element.clauses)
    return f"({time} {element.sign} {duration})"


@compiles(_Later, "postgresql")
@compiles(_Earlier, "postgresql")
def _add_in_utc(element: _Later, compiler: Any, **kw: Any) -> str:
    time, duration = (compiler.process(each, **kw) for each in element.clauses)
    return f"timezone('UTC', timezone('UTC', {time}) {element.sign} {duration})"

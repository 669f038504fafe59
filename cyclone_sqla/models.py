"""The tables, as declarative models in a metadata of their own.

:class:`Job` is public: ``select(Job)`` and relationships to it work as with any mapped class.
Everything else here is the library's own bookkeeping. Every index predicate is made of literals,
because a statement whose state is a bound value cannot use a partial index once its plan is
generic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Index, SmallInteger, Text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, registry
from sqlalchemy.sql.functions import FunctionElement

from cyclone_sqla.lifecycle import ACTIVE, DUE_BY_TIME, TERMINAL, State, WaitsFor

# ---- column types --------------------------------------------------------------------------------

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Timestamp(sa.types.TypeDecorator[datetime]):
    """An aware datetime: ``timestamptz`` on servers, integer microseconds (UTC) on SQLite."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(BigInteger())
        return dialect.type_descriptor(sa.DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return (value - EPOCH) // MICROSECOND

    def result_processor(self, dialect: sa.Dialect, coltype: Any) -> Any:
        # Not process_result_value, whose wrapper takes longer than the value: for each of each row.
        if dialect.name == "sqlite":
            return _as_datetime
        return super().result_processor(dialect, coltype)


def _as_datetime(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else EPOCH + timedelta(microseconds=microseconds)


class Duration(sa.types.TypeDecorator[timedelta]):
    """A timedelta: ``interval`` on servers, integer microseconds on SQLite."""

    impl = sa.Interval
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        return dialect.type_descriptor(BigInteger() if dialect.name == "sqlite" else sa.Interval())

    def process_bind_param(self, value: timedelta | None, dialect: sa.Dialect) -> Any:
        return value // MICROSECOND if value is not None and dialect.name == "sqlite" else value

    def result_processor(self, dialect: sa.Dialect, coltype: Any) -> Any:
        if dialect.name == "sqlite":
            return _as_timedelta
        return super().result_processor(dialect, coltype)


def _as_timedelta(microseconds: int | None) -> timedelta | None:
    return None if microseconds is None else timedelta(microseconds=microseconds)


class JsonText(sa.types.UserDefinedType[str]):
    """JSON kept as the text that was given: ``json`` on servers (``jsonb`` would change numbers and
    key order).

    Read back as text. On SQLite the column is TEXT; never cast there, ``CAST(… AS JSON)`` yields 0.
    """

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "JSON"

    def column_expression(self, colexpr: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.type_coerce(_JsonAsText(colexpr), Text)


class _JsonAsText(FunctionElement[str]):
    """``column::text`` where JSON is a type of its own, the column itself elsewhere."""

    inherit_cache = True
    type = Text()


@compiles(_JsonAsText)
def _cast_json(element: _JsonAsText, compiler: Any, **kw: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **kw)} AS TEXT)"


@compiles(_JsonAsText, "sqlite")
def _keep_json(element: _JsonAsText, compiler: Any, **kw: Any) -> str:
    return cast(str, compiler.process(element.clauses, **kw))


@compiles(JsonText, "sqlite")
def _json_column_on_sqlite(type_: JsonText, compiler: Any, **kw: Any) -> str:
    return "TEXT"


class JsonObject(sa.types.TypeDecorator[dict[str, Any]]):
    """A small JSON object or list of the library's own, as Python values."""

    impl = JsonText
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.type_coerce(_JsonAsText(column), self)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


BigId = BigInteger().with_variant(sa.Integer(), "sqlite")
"""BIGINT, but INTEGER on SQLite, where only INTEGER PRIMARY KEY is the rowid."""


# ---- literal predicates: one constant each, for the index and for the statements that use it -----


def literals(values: Iterable[str]) -> str:
    """``'a', 'b'``: a list of SQL string literals of the library's own words."""
    return ", ".join(f"'{value}'" for value in values)


IS_AVAILABLE = f"state = '{State.AVAILABLE}'"
IS_RUNNING = f"state = '{State.RUNNING}'"
IS_PAUSED = f"state = '{State.PAUSED}'"
IS_DUE_BY_TIME = f"state = '{State.PENDING}' AND waits_for IN ({literals(DUE_BY_TIME)})"
IS_INCOMING = f"state = '{State.PENDING}' AND waits_for = '{WaitsFor.ADMISSION}'"
IS_IN_LINE = "sequence_open IS NOT NULL"
IS_ADMITTED = "admitted IS NOT NULL"
HAS_POSITION = "position IS NOT NULL"
IS_DEBT = "admitted IS NOT NULL AND sequence_open IS NULL"
IS_HALTED = (
    "admitted IS NOT NULL AND sequence_open IS NOT NULL "
    f"AND state IN ({literals((State.DISCARDED, State.CANCELLED))})"
)
IS_HELD_BACK = (
    f"admitted IS NOT NULL AND state = '{State.PENDING}' AND waits_for = '{WaitsFor.TURN}'"
)
HOLDS_UNIQUE_KEY = f"unique_key IS NOT NULL AND state IN ({literals(ACTIVE)})"
IS_DEAD_LETTER = "dead_letter IS NOT NULL"
IS_OVER = (
    f"state IN ({literals(TERMINAL)}) AND dead_letter IS NULL "
    "AND sequence_open IS NULL AND admitted IS NULL"
)


def _index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    return Index(
        name,
        *(sa.text(column) if "(" in column else column for column in columns),
        unique=unique,
        postgresql_where=sa.text(where),
        sqlite_where=sa.text(where),
    )


# ---- models --------------------------------------------------------------------------------------


class Base(DeclarativeBase):
    """The library's own base: its metadata never mixes with an application's."""

    metadata = sa.MetaData(
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
            "ck": "%(table_name)s_%(constraint_name)s_check",
        }
    )


class JobRow:
    """What the mapped class adds to its columns."""

    state: Mapped[str]
    finished_at: Mapped[datetime | None]

    @hybrid_property
    def is_terminal(self) -> bool:
        """Whether the job's life has ended (completed, discarded or cancelled)."""
        return self.state in TERMINAL

    @is_terminal.inplace.expression
    @classmethod
    def _is_terminal_expression(cls) -> sa.ColumnElement[bool]:
        return cls.state.in_([str(state) for state in TERMINAL])

    @hybrid_property
    def completed_at(self) -> datetime | None:
        """When the job was completed; None if it was not."""
        return self.finished_at if self.state == State.COMPLETED else None

    @completed_at.inplace.expression
    @classmethod
    def _completed_at_expression(cls) -> sa.ColumnElement[datetime | None]:
        return sa.case((cls.state == State.COMPLETED, cls.finished_at))

    def __repr__(self) -> str:
        return f"<Job {getattr(self, 'id', None)} {getattr(self, 'kind', None)} {self.state}>"


class Job(JobRow, Base):
    """One job. Read it freely; change it only through the library's verbs.

    ``arguments`` and ``result`` are JSON text. ``run_at`` is when it may run first (or again),
    ``started_at`` when its latest run was claimed, ``failed_at`` when its latest failed attempt
    ended, ``finished_at`` when it became terminal. ``attempt`` counts runs, ``snoozes`` those that
    don't count towards ``max_attempts``, ``crashes`` those that ended with their worker.
    """

    __tablename__ = "cyclone_job"

    id: Mapped[int] = mapped_column(BigId, Identity(always=False), primary_key=True)
    kind: Mapped[str] = mapped_column(Text)
    queue: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    state: Mapped[str] = mapped_column(Text)
    waits_for: Mapped[str | None] = mapped_column(Text)
    arguments: Mapped[str] = mapped_column(JsonText)
    headers: Mapped[dict[str, str] | None] = mapped_column(JsonObject)
    unique_key: Mapped[str | None] = mapped_column(Text)
    sequence_key: Mapped[str | None] = mapped_column(Text)
    position: Mapped[int | None] = mapped_column(BigInteger)
    sequence_open: Mapped[bool | None]
    admitted: Mapped[bool | None]
    on_failure: Mapped[str | None] = mapped_column(Text)
    run_at: Mapped[datetime] = mapped_column(Timestamp)
    deadline: Mapped[datetime | None] = mapped_column(Timestamp)
    timeout: Mapped[timedelta | None] = mapped_column(Duration)
    attempt: Mapped[int] = mapped_column(sa.Integer, server_default=sa.text("0"))
    max_attempts: Mapped[int] = mapped_column(sa.Integer)
    snoozes: Mapped[int] = mapped_column(sa.Integer, server_default=sa.text("0"))
    crashes: Mapped[int] = mapped_column(sa.Integer, server_default=sa.text("0"))
    lease: Mapped[int] = mapped_column(BigInteger, server_default=sa.text("0"))
    leased_until: Mapped[datetime | None] = mapped_column(Timestamp)
    worker: Mapped[str | None] = mapped_column(Text)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(Timestamp)
    dead_letter: Mapped[bool | None]
    last_error: Mapped[str | None] = mapped_column(Text)
    result: Mapped[str | None] = mapped_column(JsonText)
    origin: Mapped[str | None] = mapped_column(Text)
    tenant: Mapped[str | None] = mapped_column(Text)
    trace_id: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    updated_at: Mapped[datetime] = mapped_column(Timestamp)
    started_at: Mapped[datetime | None] = mapped_column(Timestamp)
    failed_at: Mapped[datetime | None] = mapped_column(Timestamp)
    finished_at: Mapped[datetime | None] = mapped_column(Timestamp)

    __table_args__ = (
        # Short, because PostgreSQL reads them anew for every statement that writes jobs: if it is
        # about one job, a good part of its time is that.
        CheckConstraint(
            f"CASE WHEN finished_at IS NULL THEN state IN ({literals(ACTIVE)}) "
            f"ELSE state IN ({literals(TERMINAL)}) END",
            name="state",
        ),
        CheckConstraint(
            f"(state = '{State.PENDING}') = (waits_for IS NOT NULL) "
            f"AND waits_for IN ({literals(WaitsFor)})",
            name="waits_for",
        ),
        CheckConstraint(
            f"({IS_RUNNING}) = (leased_until IS NOT NULL) "
            "AND (leased_until IS NULL OR worker IS NOT NULL)",
            name="lease",
        ),
        CheckConstraint(
            f"sequence_key IS NULL OR admitted IS NOT NULL "
            f"OR state NOT IN ({literals((State.AVAILABLE, State.RUNNING))})",
            name="turn",
        ),
        _index("cyclone_job_available", "queue", "kind", "priority", "id", where=IS_AVAILABLE),
        _index("cyclone_job_due", "run_at", where=IS_DUE_BY_TIME),
        _index("cyclone_job_leased", "leased_until", where=IS_RUNNING),
        _index("cyclone_job_paused", "id", where=IS_PAUSED),
        _index("cyclone_job_admission", "id", where=IS_INCOMING),
        _index("cyclone_job_line", "sequence_key", "coalesce(position, id)", where=IS_IN_LINE),
        _index("cyclone_job_admitted", "sequence_key", where=IS_ADMITTED, unique=True),
        _index("cyclone_job_debt", "id", where=IS_DEBT),
        _index("cyclone_job_halted", "id", where=IS_HALTED),
        _index("cyclone_job_held_back", "id", where=IS_HELD_BACK),
        _index("cyclone_job_position", "sequence_key", "position", where=HAS_POSITION, unique=True),
        _index("cyclone_job_unique", "kind", "unique_key", where=HOLDS_UNIQUE_KEY, unique=True),
        _index("cyclone_job_over", "state", "finished_at", where=IS_OVER),
        _index("cyclone_job_dead_letter", "finished_at", where=IS_DEAD_LETTER),
        # An id is never given twice, also after its row was pruned.
        {"sqlite_autoincrement": True},
    )


class HistoryEntry(Base):
    """One thing that happened to a job and is worth keeping: a failed attempt, a rescue, a person's
    act.
    """

    __tablename__ = "cyclone_history"

    id: Mapped[int] = mapped_column(BigId, Identity(always=False), primary_key=True)
    job_id: Mapped[int] = mapped_column(BigId, ForeignKey(Job.id, ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(Timestamp)
    event: Mapped[str] = mapped_column(Text)
    attempt: Mapped[int | None] = mapped_column(sa.Integer)
    lease: Mapped[int | None] = mapped_column(BigInteger)
    worker: Mapped[str | None] = mapped_column(Text)
    actor: Mapped[str | None] = mapped_column(Text)
    error: Mapped[str | None] = mapped_column(Text)
    details: Mapped[str | None] = mapped_column(JsonText)

    __table_args__ = (Index("cyclone_history_job", "job_id", "id"),)


class IdempotencyKey(Base):
    """The first job of a key, remembered beyond the job's own retention."""

    __tablename__ = "cyclone_idempotency_key"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    key: Mapped[str] = mapped_column(Text, primary_key=True)
    job_id: Mapped[int | None] = mapped_column(BigInteger)
    queue: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Timestamp)

    __table_args__ = (Index("cyclone_idempotency_key_age", "created_at"),)


class Queue(Base):
    """What is known of a queue beyond its jobs: whether, since when and by whom it is paused."""

    __tablename__ = "cyclone_queue"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    paused_at: Mapped[datetime | None] = mapped_column(Timestamp)
    paused_by: Mapped[str | None] = mapped_column(Text)


class Sequence(Base):
    """What is known of a sequence beyond its jobs: whether it is paused, how far its positions are.

    ``released_through`` is there if the key's jobs have explicit positions: all up to it are
    released, also those whose rows retention has removed.
    """

    __tablename__ = "cyclone_sequence"

    key: Mapped[str] = mapped_column(Text, primary_key=True)
    paused_at: Mapped[datetime | None] = mapped_column(Timestamp)
    paused_by: Mapped[str | None] = mapped_column(Text)
    released_through: Mapped[int | None] = mapped_column(BigInteger)

    __table_args__ = (_index("cyclone_sequence_paused", "key", where="paused_at IS NOT NULL"),)


class WorkerRecord(Base):
    """A worker process and when it was last heard of: never a reason to touch its jobs."""

    __tablename__ = "cyclone_worker"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(sa.Integer)
    queues: Mapped[dict[str, Any]] = mapped_column(JsonObject)
    kinds: Mapped[dict[str, Any]] = mapped_column(JsonObject)
    started_at: Mapped[datetime] = mapped_column(Timestamp)
    seen_at: Mapped[datetime] = mapped_column(Timestamp)


class Counter(Base):
    """A number that only rises, where the database has no sequences: the last lease given."""

    __tablename__ = "cyclone_counter"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


LEASE_COUNTER = "lease"
"""The name of the counter row, and the stem of the sequence, that leases are drawn from."""

LEASE_SEQUENCE = sa.Sequence("cyclone_lease_seq", metadata=Base.metadata)
"""Where a server draws leases from: one sequence for all jobs, so that a lease fences a whole key.
"""


# ---- the same tables in another schema -----------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """The tables of one schema (None: the connection's default one)."""

    schema: str | None
    job: sa.Table
    history: sa.Table
    idempotency_key: sa.Table
    queue: sa.Table
    sequence: sa.Table
    worker: sa.Table
    counter: sa.Table
    lease_sequence: sa.Sequence

    def of(self, dialect_name: str) -> list[sa.Table]:
        """The tables that exist on this kind of database, in order of creation."""
        tables = [
            self.job,
            self.history,
            self.idempotency_key,
            self.queue,
            self.sequence,
            self.worker,
        ]
        return [*tables, self.counter] if dialect_name == "sqlite" else tables


@cache
def tables_in(schema: str | None) -> Tables:
    """The tables of a schema, built once."""
    metadata = Base.metadata
    if schema is not None:
        metadata = sa.MetaData(schema=schema, naming_convention=Base.metadata.naming_convention)
        for each in Base.metadata.sorted_tables:
            each.to_metadata(metadata, schema=schema)
    prefix = "" if schema is None else f"{schema}."

    def table(model: type[Base]) -> sa.Table:
        return metadata.tables[f"{prefix}{model.__tablename__}"]

    return Tables(
        schema=schema,
        job=table(Job),
        history=table(HistoryEntry),
        idempotency_key=table(IdempotencyKey),
        queue=table(Queue),
        sequence=table(Sequence),
        worker=table(WorkerRecord),
        counter=table(Counter),
        lease_sequence=sa.Sequence(LEASE_SEQUENCE.name, schema=schema, metadata=metadata)
        if schema is not None
        else LEASE_SEQUENCE,
    )


@cache
def job_class(schema: str | None) -> type[Job]:
    """The mapped class for a schema: :class:`Job` itself, or one with the same attributes."""
    if schema is None:
        return Job
    mapped = type("Job", (JobRow,), {"__doc__": Job.__doc__})
    registry().map_imperatively(mapped, tables_in(schema).job)
    return cast("type[Job]", mapped)

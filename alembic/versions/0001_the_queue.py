"""The tables of the queue."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0001"
down_revision = None

# SQLite has no times and no durations of its own: both are integers there, in microseconds (UTC).
# Its only self-numbering column is INTEGER PRIMARY KEY.
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIMESTAMP = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")
DURATION = sa.Interval().with_variant(sa.BigInteger(), "sqlite")
JSON = sa.JSON().with_variant(sa.Text(), "sqlite")

LEASE_SEQUENCE = "cyclone_lease_seq"


def upgrade(op: Operations, schema: str | None) -> None:
    create_jobs(op, schema)
    create_history(op, schema)
    create_idempotency_keys(op, schema)
    create_queues(op, schema)
    create_sequences(op, schema)
    create_workers(op, schema)
    create_leases(op, schema)


def downgrade(op: Operations, schema: str | None) -> None:
    drop_leases(op, schema)
    for table in (
        "cyclone_worker",
        "cyclone_sequence",
        "cyclone_queue",
        "cyclone_idempotency_key",
        "cyclone_history",
        "cyclone_job",
    ):
        op.drop_table(table, schema=schema)


def create_jobs(op: Operations, schema: str | None) -> None:
    op.create_table(
        "cyclone_job",
        sa.Column("id", BIG_ID, sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("waits_for", sa.Text()),
        sa.Column("arguments", JSON, nullable=False),
        sa.Column("headers", JSON),
        sa.Column("unique_key", sa.Text()),
        sa.Column("sequence_key", sa.Text()),
        sa.Column("position", sa.BigInteger()),
        sa.Column("sequence_open", sa.Boolean()),
        sa.Column("admitted", sa.Boolean()),
        sa.Column("on_failure", sa.Text()),
        sa.Column("run_at", TIMESTAMP, nullable=False),
        sa.Column("deadline", TIMESTAMP),
        sa.Column("timeout", DURATION),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("snoozes", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("crashes", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("leased_until", TIMESTAMP),
        sa.Column("worker", sa.Text()),
        sa.Column("cancel_requested_at", TIMESTAMP),
        sa.Column("dead_letter", sa.Boolean()),
        sa.Column("last_error", sa.Text()),
        sa.Column("result", JSON),
        sa.Column("origin", sa.Text()),
        sa.Column("tenant", sa.Text()),
        sa.Column("trace_id", sa.Text()),
        sa.Column("created_at", TIMESTAMP, nullable=False),
        sa.Column("updated_at", TIMESTAMP, nullable=False),
        sa.Column("started_at", TIMESTAMP),
        sa.Column("failed_at", TIMESTAMP),
        sa.Column("finished_at", TIMESTAMP),
        sa.CheckConstraint(
            "CASE WHEN finished_at IS NULL "
            "THEN state IN ('pending', 'available', 'running', 'paused') "
            "ELSE state IN ('completed', 'discarded', 'cancelled') END",
            name="cyclone_job_state_check",
        ),
        sa.CheckConstraint(
            "(state = 'pending') = (waits_for IS NOT NULL) "
            "AND waits_for IN ('admission', 'turn', 'time', 'retry', 'dependencies')",
            name="cyclone_job_waits_for_check",
        ),
        sa.CheckConstraint(
            "(state = 'running') = (leased_until IS NOT NULL) "
            "AND (leased_until IS NULL OR worker IS NOT NULL)",
            name="cyclone_job_lease_check",
        ),
        sa.CheckConstraint(
            "sequence_key IS NULL OR admitted IS NOT NULL OR state NOT IN ('available', 'running')",
            name="cyclone_job_turn_check",
        ),
        sa.PrimaryKeyConstraint("id", name="cyclone_job_pkey"),
        schema=schema,
        sqlite_autoincrement=True,
    )
    create_job_indexes(op, schema)


def create_job_indexes(op: Operations, schema: str | None) -> None:
    def index(name: str, *columns: str, where: str, unique: bool = False) -> None:
        op.create_index(
            f"cyclone_job_{name}",
            "cyclone_job",
            [sa.text(column) if "(" in column else column for column in columns],
            schema=schema,
            unique=unique,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )

    index("available", "queue", "kind", "priority", "id", where="state = 'available'")
    index("due", "run_at", where="state = 'pending' AND waits_for IN ('time', 'retry')")
    index("leased", "leased_until", where="state = 'running'")
    index("paused", "id", where="state = 'paused'")
    index("admission", "id", where="state = 'pending' AND waits_for = 'admission'")
    index("line", "sequence_key", "coalesce(position, id)", where="sequence_open IS NOT NULL")
    index("admitted", "sequence_key", where="admitted IS NOT NULL", unique=True)
    index("debt", "id", where="admitted IS NOT NULL AND sequence_open IS NULL")
    index(
        "halted",
        "id",
        where="admitted IS NOT NULL AND sequence_open IS NOT NULL "
        "AND state IN ('discarded', 'cancelled')",
    )
    index(
        "held_back",
        "id",
        where="admitted IS NOT NULL AND state = 'pending' AND waits_for = 'turn'",
    )
    index("position", "sequence_key", "position", where="position IS NOT NULL", unique=True)
    index(
        "unique",
        "kind",
        "unique_key",
        where="unique_key IS NOT NULL AND state IN ('pending', 'available', 'running', 'paused')",
        unique=True,
    )
    index(
        "over",
        "state",
        "finished_at",
        where="state IN ('completed', 'discarded', 'cancelled') AND dead_letter IS NULL "
        "AND sequence_open IS NULL AND admitted IS NULL",
    )
    index("dead_letter", "finished_at", where="dead_letter IS NOT NULL")


def create_history(op: Operations, schema: str | None) -> None:
    jobs = "cyclone_job" if schema is None else f"{schema}.cyclone_job"
    op.create_table(
        "cyclone_history",
        sa.Column("id", BIG_ID, sa.Identity(always=False), nullable=False),
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("at", TIMESTAMP, nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer()),
        sa.Column("lease", sa.BigInteger()),
        sa.Column("worker", sa.Text()),
        sa.Column("actor", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("details", JSON),
        sa.ForeignKeyConstraint(
            ["job_id"], [f"{jobs}.id"], name="cyclone_history_job_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="cyclone_history_pkey"),
        schema=schema,
    )
    op.create_index("cyclone_history_job", "cyclone_history", ["job_id", "id"], schema=schema)


def create_idempotency_keys(op: Operations, schema: str | None) -> None:
    op.create_table(
        "cyclone_idempotency_key",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("job_id", sa.BigInteger()),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("created_at", TIMESTAMP, nullable=False),
        sa.PrimaryKeyConstraint("kind", "key", name="cyclone_idempotency_key_pkey"),
        schema=schema,
    )
    op.create_index(
        "cyclone_idempotency_key_age", "cyclone_idempotency_key", ["created_at"], schema=schema
    )


def create_queues(op: Operations, schema: str | None) -> None:
    op.create_table(
        "cyclone_queue",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("paused_at", TIMESTAMP),
        sa.Column("paused_by", sa.Text()),
        sa.PrimaryKeyConstraint("name", name="cyclone_queue_pkey"),
        schema=schema,
    )


def create_sequences(op: Operations, schema: str | None) -> None:
    op.create_table(
        "cyclone_sequence",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("paused_at", TIMESTAMP),
        sa.Column("paused_by", sa.Text()),
        sa.Column("released_through", sa.BigInteger()),
        sa.PrimaryKeyConstraint("key", name="cyclone_sequence_pkey"),
        schema=schema,
    )
    is_paused = sa.text("paused_at IS NOT NULL")
    op.create_index(
        "cyclone_sequence_paused",
        "cyclone_sequence",
        ["key"],
        schema=schema,
        postgresql_where=is_paused,
        sqlite_where=is_paused,
    )


def create_workers(op: Operations, schema: str | None) -> None:
    op.create_table(
        "cyclone_worker",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("queues", JSON, nullable=False),
        sa.Column("kinds", JSON, nullable=False),
        sa.Column("started_at", TIMESTAMP, nullable=False),
        sa.Column("seen_at", TIMESTAMP, nullable=False),
        sa.PrimaryKeyConstraint("id", name="cyclone_worker_pkey"),
        schema=schema,
    )


def create_leases(op: Operations, schema: str | None) -> None:
    """Leases are drawn from a sequence, or from a counter where the database has no sequences."""
    if op.get_context().dialect.supports_sequences:
        op.execute(sa.schema.CreateSequence(sa.Sequence(LEASE_SEQUENCE, schema=schema)))
        return
    counter = op.create_table(
        "cyclone_counter",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="cyclone_counter_pkey"),
        schema=schema,
    )
    op.bulk_insert(counter, [{"name": "lease", "value": 0}])


def drop_leases(op: Operations, schema: str | None) -> None:
    if op.get_context().dialect.supports_sequences:
        op.execute(sa.schema.DropSequence(sa.Sequence(LEASE_SEQUENCE, schema=schema)))
    else:
        op.drop_table("cyclone_counter", schema=schema)

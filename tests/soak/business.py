"""What the workers of a soak run do, and what they leave behind for the verdict."""

import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, Worker
from tests.crashes import bank

AMOUNT = 1
"""Cents that each transfer moves."""


class Base(DeclarativeBase):
    """The business's own."""


class Ticket(Base):
    """Written in the transaction that enqueues a job: there is a job for each, and no other job."""

    __tablename__ = "ticket"

    job_id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    sequence_key: Mapped[str | None]
    on_failure: Mapped[str | None]


class Entry(Base):
    """Written in the transaction that completes its job: one for each job that owes it."""

    __tablename__ = "entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int]


OWES_ENTRY = ("step", "step_async", "parent")
"""Kinds whose jobs write one entry when they complete."""

LOGS = {
    "postgresql": """
CREATE TABLE ending (
    id bigint GENERATED ALWAYS AS IDENTITY, job_id bigint, state text,
    started_at timestamptz, finished_at timestamptz
);
CREATE FUNCTION log_ending() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO ending (job_id, state, started_at, finished_at)
    VALUES (
        new.id, CASE WHEN new.finished_at = old.finished_at THEN 'skipped' ELSE new.state END,
        new.started_at, new.finished_at
    );
    RETURN new;
END $$;
CREATE TRIGGER log_ending AFTER UPDATE ON cyclone_job FOR EACH ROW WHEN (
    new.finished_at IS NOT NULL
    AND (old.state <> new.state OR old.finished_at IS DISTINCT FROM new.finished_at)
) EXECUTE FUNCTION log_ending()
""",
    "sqlite": """
CREATE TABLE ending (
    id integer PRIMARY KEY AUTOINCREMENT, job_id bigint, state text,
    started_at bigint, finished_at bigint
);;
CREATE TRIGGER log_ending AFTER UPDATE ON cyclone_job WHEN
    new.finished_at IS NOT NULL
    AND (old.state <> new.state OR old.finished_at IS NOT new.finished_at)
BEGIN
    INSERT INTO ending (job_id, state, started_at, finished_at)
    VALUES (
        new.id, CASE WHEN new.finished_at = old.finished_at THEN 'skipped' ELSE new.state END,
        new.started_at, new.finished_at
    );
END
""",
}
"""The database's own log of every end of a job, which outlives the job; statements end in `;;`.

A halted head that a person skips counts as completed, though it has not run; here it is "skipped".
"""


def create(engine: sa.Engine) -> None:
    """The tables of the business, two accounts, and the log of endings."""
    Base.metadata.create_all(engine)
    bank.Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([bank.Account(id=1, balance=0), bank.Account(id=2, balance=0)])
        for statement in LOGS[engine.dialect.name].split(";;"):
            session.connection().exec_driver_sql(statement)


def application(url: str, directory: Path) -> Cyclone:
    """The actions; `directory` is where they tell which process runs them."""
    cyclone = Cyclone(url)
    bank.register(cyclone, sa.create_engine(url))

    @cyclone.action(backoff=0.05)
    def plain(millis: int) -> None:
        time.sleep(millis / 1000)

    @cyclone.action(backoff=0.05)
    def step(ctx: Context, fails: int) -> None:
        ctx.session.add(Entry(job_id=ctx.job.id))
        ctx.session.flush()
        _fail(ctx, fails)

    @cyclone.action(backoff=0.05)
    async def step_async(ctx: Context, fails: int) -> None:
        ctx.async_session.add(Entry(job_id=ctx.job.id))
        await ctx.async_session.flush()
        await asyncio.sleep(0.005)
        _fail(ctx, fails)

    @cyclone.action(backoff=0.05)
    def parent(ctx: Context) -> None:
        ctx.session.add(Entry(job_id=ctx.job.id))
        child = cyclone.enqueue(ctx.session, "plain", {"millis": 1})
        ctx.session.add(
            Ticket(job_id=child.id, kind="plain", sequence_key=None, on_failure=None),
        )

    @cyclone.action(backoff=0.05)
    def exit_once(ctx: Context) -> None:
        if ctx.attempt == 1:
            os._exit(137)

    @cyclone.action(backoff=0.05)
    def probe() -> None:
        (directory / f"seen.{os.getpid()}").touch()
        time.sleep(0.05)

    return cyclone


def _fail(ctx: Context, times: int) -> None:
    if ctx.attempt <= times:
        raise ValueError("it fails as it was told to")


def work(url: str, directory: Path, output: Path, settings: dict[str, Any]) -> None:
    """Work until this process is killed; a database that is away is an exit of one line."""
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.__stderr__, format=form, force=True)
    try:
        Worker(application(url, directory), **settings).run()
    except DBAPIError as exc:
        sys.exit(f"no database: {str(exc.orig).splitlines()[0]}")

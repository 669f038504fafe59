"""SQLAlchemy's horizontal sharding: each shard is a database with a queue of its own."""

from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cyclone_sqla import Context, Cyclone, Worker
from tests.databases import Database, PostgresCopies, sqlite_copy
from tests.waiting import wait_until

SHARDS = ("north", "south")

shard: ContextVar[str] = ContextVar("shard")


class Base(DeclarativeBase):
    """The application's own."""


class Account(Base):
    """A row that lives beside its jobs."""

    __tablename__ = "sharded_account"

    id: Mapped[int] = mapped_column(primary_key=True)
    opened: Mapped[bool] = mapped_column(default=False)


@pytest.fixture(params=["postgresql", "sqlite"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Engine]]:
    """A database for each shard."""
    with ExitStack() as stack:
        databases: dict[str, Database] = {}
        for name in SHARDS:
            if request.param == "postgresql":
                copies: PostgresCopies = request.getfixturevalue("postgres_copies")
                databases[name] = stack.enter_context(copies.lend())
            else:
                template = request.getfixturevalue("sqlite_template_file")
                (tmp_path / name).mkdir()
                databases[name] = stack.enter_context(sqlite_copy(template, tmp_path / name))
        engines = {name: database.engine() for name, database in databases.items()}
        for engine in engines.values():
            Base.metadata.create_all(engine)
        yield engines


def sharded(engines: dict[str, Engine]) -> ShardedSession:
    """A session that goes where the context says."""
    here: Any = lambda *_, **__: [shard.get()]  # noqa: E731
    return ShardedSession(
        shards=engines,
        shard_chooser=lambda *_, **__: shard.get(),
        identity_chooser=here,
        execute_chooser=here,
    )


def application(done: list[tuple[str, int]]) -> Cyclone:
    cyclone = Cyclone()

    @cyclone.action(kind="open")
    def open_account(ctx: Context, account: Account) -> None:
        account.opened = True
        done.append((ctx.session.get_bind().url.database or "", account.id))

    return cyclone


def test_a_job_is_where_its_row_is_and_is_run_by_the_worker_of_that_shard(
    engines: dict[str, Engine],
) -> None:
    done: list[tuple[str, int]] = []
    cyclone = application(done)
    action: Any = cyclone.registry.get("open")
    for name in SHARDS:
        shard.set(name)
        with sharded(engines) as session, session.begin():
            account = Account()
            session.add(account)
            action.using(unique="only").enqueue(session, account)  # unique in its shard
            session.commit()
    with ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(Worker(cyclone, database=engine, poll=0.1))
        wait_until(lambda: len(done) == len(SHARDS), "each shard's worker has run its job")

    assert sorted(done) == sorted((engine.url.database, 1) for engine in engines.values())
    for engine in engines.values():
        with engine.connect() as connection:
            assert connection.scalars(sa.select(Account.opened)).all() == [True]


def test_a_connection_of_the_session_names_the_shard_by_itself(engines: dict[str, Engine]) -> None:
    cyclone = Cyclone()
    shard.set("north")
    with sharded(engines) as session, session.begin():
        south = session.connection(bind_arguments={"shard_id": "south"})
        ref = cyclone.enqueue(south, "elsewhere", {})
        assert cyclone.get(south, ref.id).kind == "elsewhere"
        session.rollback()
    for engine in engines.values():
        with engine.connect() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(cyclone.job_class)) == 0

"""The environment of asynchronous applications: the same, in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from cyclone_sqla import ConfigurationError, Context, Cyclone, begin_before_savepoints
from cyclone_sqla.testing import AsyncCycloneEnv, NotIdleError
from tests.databases import Database
from tests.shop import Base, Order

DRIVERS = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}

Scene = Callable[[AsyncCycloneEnv, "Application"], Coroutine[Any, Any, None]]


class Application:
    """A shop whose actions are of both kinds."""

    def __init__(self) -> None:
        self.cyclone = Cyclone()
        self.sent: list[str] = []
        self.loops: set[int] = set()

        @self.cyclone.action
        async def send(to: str) -> None:
            await asyncio.sleep(0)
            self.loops.add(id(asyncio.get_running_loop()))
            self.sent.append(to)

        @self.cyclone.action
        async def order(ctx: Context, note: str, total: int = 0) -> None:
            ctx.async_session.add(Order(note=note, total=total))
            await ctx.async_session.flush()
            await send.enqueue(ctx.async_session, to=note)

        @self.cyclone.action
        def note(ctx: Context, text: str) -> None:
            ctx.session.add(Order(note=text))
            ctx.session.flush()
            self.sent.append(ctx.session.scalars(sa.select(Order.note)).one())

        self.send, self.order, self.note = send, order, note


@asynccontextmanager
async def environment(
    engine: AsyncEngine, app: Application, **options: bool
) -> AsyncIterator[AsyncCycloneEnv]:
    """Of which nothing may remain."""
    begin_before_savepoints(engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncCycloneEnv(connection, app.cyclone, **options) as env:
            yield env
        assert outer.is_active
        await outer.rollback()
    async with engine.connect() as connection:
        for table in ("cyclone_job", "cyclone_history", "cyclone_sequence", "shop_order"):
            assert await connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 0


def play(
    database: Database, scene: Scene, driver: str | None = None, **options: bool
) -> Application:
    """A scene in an event loop of its own, and the application that it was of."""
    app = Application()
    url = database.url_for(driver or DRIVERS[database.dialect])
    asyncio.run(_play(url, app, scene, options))
    return app


async def _play(url: str, app: Application, scene: Scene, options: dict[str, bool]) -> None:
    engine = create_async_engine(url)
    try:
        async with environment(engine, app, **options) as env:
            await scene(env, app)
        assert app.loops <= {id(asyncio.get_running_loop())}
    finally:
        await engine.dispose()


def test_a_commit_runs_jobs_in_the_tests_own_loop_and_session(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        async with env.session.begin():
            await app.order.enqueue(env.session, note="b")
            assert app.sent == []
        assert app.sent == ["b"]
        assert (await env.session.scalars(sa.select(Order.note))).all() == ["b"]
        await env.assert_completed(app.order, note="b")

    assert play(database, scene).loops
    if database.dialect == "postgresql":
        assert play(database, scene, "psycopg").loops


def test_sync_actions_have_their_session_there_too(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        async with AsyncSession(env.connection, join_transaction_mode="create_savepoint") as own:
            await app.note.enqueue(own, text="a")
            assert app.sent == []
            await own.commit()
        assert app.sent == ["a"]

    play(database, scene)


def test_jobs_wait_for_their_time_and_for_the_test(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        line = app.send.using(sequence="a")
        first = await line.using(process_in=timedelta(hours=1)).enqueue(env.session, to="first")
        second = await line.enqueue(env.session, to="second")
        await env.session.commit()
        assert await env.run_until_idle() == 0
        await env.advance(hours=1)
        assert app.sent == []
        assert (await env.run(first)).state == "completed"
        assert [job.id for job in await env.enqueued(app.send)] == [second.id]
        assert await env.run_until_idle() == 1
        assert app.sent == ["first", "second"]
        assert len(await env.jobs(app.send)) == 2

    play(database, scene, auto_start=False)


def test_a_job_that_enqueues_itself_for_ever_is_told(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        runs: list[int] = []

        @app.cyclone.action
        async def again(ctx: Context) -> None:
            runs.append(ctx.job.id)
            await again.enqueue(ctx.async_session)

        await again.enqueue(env.session)
        with pytest.raises(NotIdleError, match=r"after 20 runs .* 'again'"):
            await env.run_until_idle(limit=20)
        assert len(runs) == 20

    play(database, scene, auto_start=False)


def test_with_errors_kept_a_job_is_retried_as_the_clock_moves(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        runs: list[int] = []

        @app.cyclone.action
        async def fail_twice(ctx: Context) -> None:
            runs.append(ctx.attempt)
            if ctx.attempt < 3:
                raise ConnectionError("the mail server is down")

        await fail_twice.enqueue(env.session)
        env.raise_errors = False
        assert await env.run_until_idle() == 1
        assert await env.run_until_idle() == 0
        for _ in range(2):
            await env.advance(minutes=5)
            assert await env.run_until_idle() == 1
        assert runs == [1, 2, 3]
        assert (await env.assert_completed(fail_twice)).attempt == 3

    play(database, scene, auto_start=False)


def test_a_job_sees_what_the_test_has_not_flushed(sqlite_database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        seen: list[str] = []

        @app.cyclone.action
        async def look(ctx: Context) -> None:
            seen.extend(await ctx.async_session.scalars(sa.select(Order.note)))

        async with AsyncSession(env.connection, join_transaction_mode="create_savepoint") as own:
            await look.enqueue(own)
            await own.commit()
        env.session.add(Order(note="pending"))
        await env.run_until_idle()
        assert seen == ["pending"]

    play(sqlite_database, scene, auto_start=False)


def test_a_failure_raises_in_the_test_and_leaves_nothing_of_its_own(database: Database) -> None:
    async def scene(env: AsyncCycloneEnv, app: Application) -> None:
        env.session.add(Order(note="the test's own"))
        ref = await app.order.enqueue(env.session, note="bad", total=-1)
        with pytest.raises(sa.exc.IntegrityError):
            await env.session.commit()
        assert (await env.session.scalars(sa.select(Order.note))).all() == ["the test's own"]
        assert [event.event for event in await env.history(ref)] == ["retry"]
        env.crash(at="before_settle")
        await env.advance(minutes=10)
        assert [job.state for job in await env.enqueued(app.order)] == ["running"]

    play(database, scene)


def test_a_connection_without_a_transaction_is_refused(sqlite_database: Database) -> None:
    async def begin() -> None:
        engine = create_async_engine(sqlite_database.url_for("aiosqlite"))
        with pytest.raises(ConfigurationError, match="transaction is open"):
            AsyncCycloneEnv(AsyncConnection(engine), Cyclone())
        async with engine.connect() as connection:
            with pytest.raises(ConfigurationError, match="transaction is open"):
                async with AsyncCycloneEnv(connection, Cyclone()):
                    pass
        await engine.dispose()

    asyncio.run(begin())

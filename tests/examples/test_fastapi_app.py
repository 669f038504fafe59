"""The shop behind FastAPI, tested through its endpoints in a transaction that is rolled back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx2
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from cyclone_sqla import begin_before_savepoints
from cyclone_sqla.testing import AsyncCycloneEnv
from docs.examples import fastapi_app
from docs.examples.fastapi_app import Base, app, confirm, cyclone, get_session
from tests.databases import Database

DRIVERS = {"postgresql": "psycopg_async", "sqlite": "aiosqlite"}


class Shop:
    """The application, on the connection of a test: a client, the jobs, and what was mailed."""

    def __init__(self, env: AsyncCycloneEnv, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.env = env
        self.mails: list[tuple[str, str]] = []

    async def post(self, path: str, **body: str) -> tuple[int, Any]:
        """The status of the response, and what is in it."""
        response = await self.client.post(path, json=body)
        return response.status_code, response.json()

    def send_mail(self, to: str, text: str) -> None:
        """What takes the place of the mail server."""
        self.mails.append((to, text))


@asynccontextmanager
async def shop_on(database: Database, auto_start: bool) -> AsyncIterator[Shop]:
    """The shop on a connection whose transaction is rolled back; every request has its session."""
    engine = create_async_engine(database.url_for(DRIVERS[database.dialect]))
    begin_before_savepoints(engine)

    async def session_of_a_request() -> AsyncIterator[AsyncSession]:
        options: dict[str, Any] = {"join_transaction_mode": "create_savepoint"}
        async with AsyncSession(connection, expire_on_commit=False, **options) as session:
            yield session

    app.dependency_overrides[get_session] = session_of_a_request
    transport = httpx2.ASGITransport(app=app)
    async with (
        engine.connect() as connection,
        httpx2.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        outer = await connection.begin()
        await connection.run_sync(Base.metadata.create_all)
        async with AsyncCycloneEnv(connection, cyclone, auto_start=auto_start) as env:
            yield Shop(env, client)
        await outer.rollback()
    app.dependency_overrides.clear()
    await engine.dispose()


Story: TypeAlias = Callable[[Shop], Awaitable[None]]


def in_the_shop(*, auto_start: bool = True) -> Callable[[Story], Callable[[Database], None]]:
    """Make a test, on each database, of what a coroutine does in the shop."""

    async def told(story: Story, database: Database) -> None:
        async with shop_on(database, auto_start) as shop:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fastapi_app, "send_mail", shop.send_mail)
                await story(shop)

    return lambda story: lambda database: asyncio.run(told(story, database))


ORDER = {"reference": "tea-1", "email": "anna@example.org"}


@in_the_shop()
async def test_an_order_is_confirmed_at_once_and_its_customer_reminded_later(shop: Shop) -> None:
    assert (await shop.post("/orders", **ORDER))[0] == 201
    assert shop.mails == [("anna@example.org", "Thank you! Your order is tea-1.")]

    await shop.env.advance(days=13)
    assert len(shop.mails) == 1
    await shop.env.advance(days=1)
    assert shop.mails[1:] == [("anna@example.org", "Your order tea-1 is not paid yet.")]


@in_the_shop()
async def test_a_refused_order_leaves_no_job(shop: Shop) -> None:
    await shop.post("/orders", **ORDER)
    status, body = await shop.post("/orders", **ORDER)
    assert (status, body) == (409, {"detail": "there is an order tea-1"})
    assert len(await shop.env.jobs(confirm)) == 1
    assert len(shop.mails) == 1


@in_the_shop(auto_start=False)
async def test_an_invoice_is_made_by_one_job_at_a_time(shop: Shop) -> None:
    _, order = await shop.post("/orders", **ORDER)
    status, job = await shop.post(f"/orders/{order}/invoice")
    assert status == 202
    assert await shop.post(f"/orders/{order}/invoice") == (409, {"detail": {"job": job}})

    await shop.env.run_until_idle()

    assert shop.mails[-1] == ("anna@example.org", "Invoice for tea-1")
    assert (await shop.client.get(f"/jobs/{job}")).json() == {"state": "completed", "error": None}
    assert (await shop.post(f"/orders/{order}/invoice"))[0] == 202


@in_the_shop()
async def test_what_is_not_there_is_not_found(shop: Shop) -> None:
    assert (await shop.post("/orders/1/invoice"))[0] == 404
    assert (await shop.client.get("/jobs/1")).status_code == 404

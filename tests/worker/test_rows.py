"""Rows as arguments, on a worker's own connections; the rest is in `tests/life/test_rows.py`."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, object_session

from cyclone_sqla import Context
from cyclone_sqla.backoff import Constant
from tests.databases import Database
from tests.rows import NEW, Account, Employee, Limit, Manager, Price, Rows
from tests.waiting import wait_until
from tests.worker.site import Site

LATER = Constant(3_600)


@pytest.fixture
def site(database: Database) -> Site:
    return with_rows(Site(database))


def with_rows(site: Site) -> Site:
    Rows.metadata.create_all(site.database.engine())
    return site


def added(site: Site, *rows: Any) -> list[Any]:
    """The rows, committed and detached, with their keys."""
    with Session(site.engine, expire_on_commit=False) as session, session.begin():
        session.add_all(rows)
    return list(rows)


def names(site: Site) -> list[str]:
    with Session(site.engine) as session:
        return list(session.scalars(sa.select(Account.name).order_by(Account.id)))


def enqueued(site: Site, *args: Any, **kwargs: Any) -> int:
    with Session(site.engine) as session, session.begin():
        return site.cyclone.registry.get("work").enqueue(session, *args, **kwargs).id


def test_the_statements_stand_being_repeated(site: Site) -> None:
    def work(account: Account, accounts: list[Account], prices: list[Price]) -> None:
        account.name += "."
        assert len(accounts) == len(prices) == 2

    site.action(work)
    accounts = added(site, Account(), Account())
    prices = added(site, NEW["composite"](), Price(product="b", day=NEW["composite"]().day))
    ids = [enqueued(site, accounts[0], accounts, prices) for _ in range(20)]
    with site.worker(queues={"default": 1}):
        site.wait_until_all_are("completed")
    assert names(site) == ["." * len(ids), ""]


def test_an_action_that_starts_over_gets_its_rows_anew(postgresql_database: Database) -> None:
    engine = postgresql_database.engine(isolation_level="REPEATABLE READ")
    site = with_rows(Site(postgresql_database, engine=engine))
    runs: list[tuple[int, str]] = []

    def work(ctx: Context, account: Account) -> None:
        runs.append((ctx.attempt, account.name))
        if len(runs) == 1:
            site.execute("UPDATE row_account SET name = name || '+'")
        account.name += "!"

    site.action(work)
    job_id = enqueued(site, *added(site, Account(name="a")))
    with site.worker():
        site.wait_for(job_id, "completed")
    assert runs == [(1, "a"), (1, "a+")]
    assert names(site) == ["a+!"]


def test_a_database_that_fails_to_load_them_fails_the_attempt(site: Site) -> None:
    def work(account: Account) -> None:
        raise AssertionError("there is no such table")

    site.action(work, backoff=LATER)
    job_id = enqueued(site, *added(site, Account(name="a")))
    site.execute("ALTER TABLE row_account RENAME TO elsewhere")
    with site.worker():
        site.wait_for(job_id, "pending")
    assert len(site.history(job_id)) == 1


# ---- async actions -------------------------------------------------------------------------------


@pytest.fixture
def async_site(bare_async_site: Site) -> Site:
    return with_rows(bare_async_site)


def test_an_async_action_gets_its_rows_in_its_own_session(async_site: Site) -> None:
    site, seen = async_site, list[Any]()

    async def work(ctx: Context, accounts: list[Account], boss: Employee) -> None:
        assert object_session(accounts[0]) is ctx.async_session.sync_session
        seen.append([len(account.limits) for account in accounts])
        seen.append(boss.budget)  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        for account in accounts:
            account.name += "!"

    site.action(work)
    a, b = Account(name="a", limits=[Limit(), Limit()]), Account(name="b")
    *_, boss = added(site, a, b, Manager(budget=7))
    job_id = enqueued(site, [a, b], boss)
    with site.worker():
        site.wait_for(job_id, "completed")
    assert names(site) == ["a!", "b!"]
    assert seen == [[2, 0], 7]


def test_an_async_run_may_pass_on_a_row_that_it_has_just_made(async_site: Site) -> None:
    site = async_site

    async def work(ctx: Context, account: Account, more: int) -> None:
        if more:
            child = Account(name=account.name + "a")
            ctx.async_session.add(child)
            action: Any = site.cyclone.registry.get("work")
            await action.enqueue(ctx.async_session, child, more=more - 1)

    site.action(work)
    enqueued(site, *added(site, Account(name="a")), more=2)
    with site.worker():
        wait_until(lambda: site.states() == {"completed": 3}, "the last one has run")
    assert names(site) == ["a", "aa", "aaa"]


def test_an_async_action_without_a_context_too(async_site: Site) -> None:
    site = async_site

    async def work(account: Account) -> None:
        account.name += "!"

    site.action(work)
    a, b = added(site, Account(name="a"), Account(name="b"))
    job_ids = [enqueued(site, row) for row in (a, b)]
    site.execute("DELETE FROM row_account WHERE name = 'b'")
    with site.worker():
        site.wait_for(job_ids[0], "completed")
        site.wait_for(job_ids[1], "discarded")
    assert names(site) == ["a!"]

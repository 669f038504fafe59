"""Rows as arguments: they arrive loaded in the session of the run, or the job says what is gone."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session, object_session

from cyclone_sqla import Context
from cyclone_sqla.backoff import Constant
from tests.databases import Database
from tests.rows import NEW, Account, Code, Employee, Intern, Limit, Manager, Price, Rows, Tag
from tests.waiting import wait_until
from tests.worker.site import Site

LATER = Constant(3_600)


@pytest.fixture
def site(database: Database) -> Site:
    return with_rows(Site(database))


def with_rows(site: Site) -> Site:
    Rows.metadata.create_all(site.database.engine())
    return site


@contextmanager
def selects_from(table: str) -> Iterator[list[str]]:
    """What is sent to read a table, by any engine, while the block runs."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("SELECT") and f"FROM {table}" in statement:
            sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)


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


# ---- it arrives ----------------------------------------------------------------------------------


def test_a_row_of_every_sort_arrives_loaded(site: Site) -> None:
    seen: dict[str, Any] = {}

    def action_for(base: type[Any], sort: str) -> Any:
        def work(ctx: Context, row: Any, rows: list[Any], nobody: Any) -> None:
            assert object_session(row) is ctx.session
            assert rows == [row, row]
            assert nobody is None
            seen[sort] = type(row), sa.inspect(row).identity

        work.__annotations__ |= {"row": base, "rows": list[base], "nobody": base | None}  # type: ignore[valid-type]
        return site.cyclone.action(kind=sort)(work)

    given: dict[str, Any] = {}
    with Session(site.engine) as session, session.begin():
        for sort, new in NEW.items():
            row = new()
            session.add(row)
            action_for(type(row), sort).enqueue(session, row, rows=[row, row], nobody=None)
            given[sort] = type(row), sa.inspect(row).identity
    with site.worker():
        site.wait_until_all_are("completed")
    assert seen["padded"][1][0].strip() == "abc"
    assert {**seen, "padded": None} == {**given, "padded": None}


def test_rows_whose_keys_a_database_writes_in_its_own_way_are_found(site: Site) -> None:
    seen: list[str] = []

    def work(codes: list[Code], tags: list[Tag]) -> None:
        seen.extend(code.code.strip() for code in codes)
        seen.extend(tag.word for tag in tags)

    site.action(work)
    with Session(site.engine) as session, session.begin():
        rows: list[list[Any]] = [
            [Code(code="a"), Code(code="b")],
            [Tag(word="RED"), Tag(word="GREEN")],
        ]
        session.add_all(rows[0] + rows[1])
        site.cyclone.registry.get("work").enqueue(session, *rows)
    with site.worker():
        site.wait_until_all_are("completed")
    assert seen == ["a", "b", "red", "green"]


def test_what_the_action_does_to_it_commits_with_its_completion(site: Site) -> None:
    def work(account: Account) -> None:  # and takes no Context
        account.name += "!"

    site.action(work)
    (account,) = added(site, Account(name="a"))
    job_id = enqueued(site, account)
    with site.worker():
        site.wait_for(job_id, "completed")
    assert names(site) == ["a!"]
    assert json.loads(site.job(job_id).arguments) == {"account": account.id}


def test_if_the_action_fails_nothing_of_it_stays(site: Site) -> None:
    def work(account: Account) -> None:
        account.name += "!"
        raise ValueError("it broke")

    site.action(work, backoff=LATER)
    job_id = enqueued(site, *added(site, Account(name="a")))
    with site.worker():
        site.wait_for(job_id, "pending")
    assert names(site) == ["a"]


def test_a_row_is_what_it_was_stored_as_with_its_own_columns(site: Site) -> None:
    seen: list[Any] = []

    def work(staff: list[Employee], boss: Employee) -> None:
        with selects_from("manager") as of_managers, selects_from("employee") as of_all:
            seen.extend(
                (type(e), getattr(e, "budget", None), getattr(e, "school", None)) for e in staff
            )
            seen.append(boss.budget)  # type: ignore[attr-defined]
        assert of_managers + of_all == []

    site.action(work)
    manager, intern, plain = added(site, Manager(budget=7), Intern(school="s"), Employee())
    job_id = enqueued(site, [plain, intern, manager], boss=manager)
    with site.worker():
        site.wait_for(job_id, "completed")
    assert seen == [(Employee, None, None), (Intern, None, "s"), (Manager, 7, None), 7]


def test_a_row_that_became_of_another_class_is_gone(site: Site) -> None:
    def work(boss: Manager) -> None:
        raise AssertionError("it is no Manager")

    site.action(work)
    (intern,) = added(site, Intern(school="s"))
    job_id = site.enqueue(arguments={"boss": intern.id})
    with site.worker():
        site.wait_for(job_id, "discarded")
    assert "boss: the Manager with the primary key 1 is gone" in (site.job(job_id).last_error or "")


def test_many_rows_are_loaded_with_few_statements_in_their_order(site: Site) -> None:
    seen: list[int] = []

    def work(first: Account, accounts: list[Account]) -> None:
        seen.extend(account.id for account in [first, *accounts])

    site.action(work)
    ids = [a.id for a in added(site, *[Account() for _ in range(1_200)])]
    order = [*reversed(ids), *ids[:3]]
    job_id = site.enqueue(arguments={"first": order[0], "accounts": order})
    with selects_from("account") as sent, site.worker():
        site.wait_for(job_id, "completed")
    assert seen == [order[0], *order]
    assert len(sent) == 3


def test_rows_may_be_anywhere_in_containers(site: Site) -> None:
    seen: list[Any] = []

    def work(
        by_name: dict[str, list[Account | None]],
        pair: tuple[Account, int],
        *others: Account,
        **named: Account,
    ) -> None:
        seen.append({name: [a and a.name for a in accounts] for name, accounts in by_name.items()})
        seen.append((pair[0].name, pair[1]))
        seen.append([a.name for a in others])
        seen.append({name: a.name for name, a in named.items()})

    site.action(work)
    a, b = added(site, Account(name="a"), Account(name="b"))
    job_id = enqueued(site, {"x": [a, None, b], "y": []}, (b, 2), b, a, z=a)
    with site.worker():
        site.wait_for(job_id, "completed")
    assert seen == [{"x": ["a", None, "b"], "y": []}, ("b", 2), ["b", "a"], {"z": "a"}]


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


# ---- it has gone ---------------------------------------------------------------------------------


def test_a_job_whose_row_has_gone_is_discarded_with_its_name(site: Site) -> None:
    def work(accounts: list[Account]) -> None:
        raise AssertionError("one of them is gone")

    site.action(work)
    a, b = added(site, Account(name="a"), Account(name="b"))
    job_id = enqueued(site, [a, b])
    site.execute("DELETE FROM account WHERE name = 'b'")
    with site.worker():
        site.wait_for(job_id, "discarded")
    (entry,) = site.history(job_id)
    reason = f"accounts[1]: the Account with the primary key {b.id} is gone"
    assert reason in (entry.error or "")
    assert reason in (site.job(job_id).last_error or "")


def test_a_composite_key_that_has_gone_is_named_whole(site: Site) -> None:
    def work(price: Price) -> None:
        raise AssertionError("it is gone")

    site.action(work)
    job_id = site.enqueue(arguments={"price": ["tea", "2024-02-29"]})
    with site.worker():
        site.wait_for(job_id, "discarded")
    assert 'the primary key ["tea","2024-02-29"]' in (site.job(job_id).last_error or "")


def test_an_action_may_be_given_none_for_what_has_gone(site: Site) -> None:
    seen: list[Any] = []

    def work(account: Account | None, accounts: list[Account | None]) -> None:
        seen.append(account)
        seen.append([a and a.name for a in accounts])

    site.action(work, missing="none")
    a, b = added(site, Account(name="a"), Account(name="b"))
    job_id = enqueued(site, b, [a, b, a])
    site.execute("DELETE FROM account WHERE name = 'b'")
    with site.worker():
        site.wait_for(job_id, "completed")
    assert seen == [None, ["a", None, "a"]]


# ---- with the rest of the system -----------------------------------------------------------------


def test_an_action_that_starts_over_gets_its_rows_anew(postgresql_database: Database) -> None:
    engine = postgresql_database.engine(isolation_level="REPEATABLE READ")
    site = with_rows(Site(postgresql_database, engine=engine))
    runs: list[tuple[int, str]] = []

    def work(ctx: Context, account: Account) -> None:
        runs.append((ctx.attempt, account.name))
        if len(runs) == 1:
            site.execute("UPDATE account SET name = name || '+'")
        account.name += "!"

    site.action(work)
    job_id = enqueued(site, *added(site, Account(name="a")))
    with site.worker():
        site.wait_for(job_id, "completed")
    assert runs == [(1, "a"), (1, "a+")]
    assert names(site) == ["a+!"]


def test_a_run_may_pass_on_a_row_that_it_has_just_made(site: Site) -> None:
    def work(ctx: Context, account: Account, more: int) -> None:
        if more:
            child = Account(name=account.name + "a")
            ctx.session.add(child)
            site.cyclone.enqueue(ctx.session, "work", {"account": child, "more": more - 1})

    site.action(work)
    enqueued(site, *added(site, Account(name="a")), more=2)
    with site.worker():
        wait_until(lambda: site.states() == {"completed": 3}, "the last one has run")
    assert names(site) == ["a", "aa", "aaa"]


def test_a_database_that_fails_to_load_them_fails_the_attempt(site: Site) -> None:
    def work(account: Account) -> None:
        raise AssertionError("there is no such table")

    site.action(work, backoff=LATER)
    job_id = enqueued(site, *added(site, Account(name="a")))
    site.execute("ALTER TABLE account RENAME TO elsewhere")
    with site.worker():
        site.wait_for(job_id, "pending")
    assert len(site.history(job_id)) == 1


def test_arguments_that_this_code_can_not_read_are_refused_without_a_session(site: Site) -> None:
    def work(account: Account) -> None:
        raise AssertionError("it has no number")

    site.action(work)
    with Session(site.engine) as session, session.begin():
        spec = site.cyclone.registry.get("work").job(*added(site, Account()))
        object.__setattr__(spec, "arguments", '{"account":"x"}')
        job_id = site.cyclone.enqueue_spec(session, spec).id
    with selects_from("account") as sent, site.worker():
        site.wait_for(job_id, "discarded")
    assert "can't read the job's arguments: work: account: Input should be a valid integer" in (
        site.job(job_id).last_error or ""
    )
    assert sent == []


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
    site.execute("DELETE FROM account WHERE name = 'b'")
    with site.worker():
        site.wait_for(job_ids[0], "completed")
        site.wait_for(job_ids[1], "discarded")
    assert names(site) == ["a!"]

"""Rows as arguments: they arrive loaded in the session of the run, or the job says what is gone.

With a worker's own connections they are in `tests/worker/test_rows.py`.
"""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session, object_session

from cyclone_sqla import Context, Cyclone
from cyclone_sqla.testing import CycloneEnv
from tests.databases import on_both
from tests.rows import (
    NEW,
    Account,
    Code,
    Employee,
    Intern,
    Manager,
    Price,
    Rows,
    Tag,
    selects_from,
)

pytestmark = [on_both, pytest.mark.cyclone(auto_start=False, raise_errors=False)]

cyclone = Cyclone()
numbers = count(1)


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    Rows.metadata.create_all(cyclone_database)


@pytest.fixture
def session(cyclone_env: CycloneEnv) -> Session:
    return cyclone_env.session


def action(fn: Callable[..., Any], **options: Any) -> Any:
    """The function as an action of a kind of its own."""
    return cyclone.action(kind=f"work_{next(numbers)}", **options)(fn)


def added(session: Session, *rows: Any) -> list[Any]:
    """The rows, with their keys."""
    session.add_all(rows)
    session.commit()
    return list(rows)


def names(session: Session) -> list[str]:
    return list(session.scalars(sa.select(Account.name).order_by(Account.id)))


# ---- it arrives ----------------------------------------------------------------------------------


def test_a_row_of_every_sort_arrives_loaded(cyclone_env: CycloneEnv, session: Session) -> None:
    seen: dict[str, Any] = {}

    def action_for(base: type[Any], sort: str) -> Any:
        def work(ctx: Context, row: Any, rows: list[Any], nobody: Any) -> None:
            assert object_session(row) is ctx.session
            assert rows == [row, row]
            assert nobody is None
            seen[sort] = type(row), sa.inspect(row).identity

        work.__annotations__ |= {"row": base, "rows": list[base], "nobody": base | None}  # type: ignore[valid-type]
        return action(work)

    given: dict[str, Any] = {}
    for sort, new in NEW.items():
        row = new()
        session.add(row)
        action_for(type(row), sort).enqueue(session, row, rows=[row, row], nobody=None)
        given[sort] = type(row), sa.inspect(row).identity
    assert cyclone_env.run_until_idle() == len(NEW)
    assert seen["padded"][1][0].strip() == "abc"
    assert {**seen, "padded": None} == {**given, "padded": None}


def test_rows_whose_keys_a_database_writes_in_its_own_way_are_found(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    seen: list[str] = []

    @action
    def work(codes: list[Code], tags: list[Tag]) -> None:
        seen.extend(code.code.strip() for code in codes)
        seen.extend(tag.word for tag in tags)

    codes, tags = [Code(code="a"), Code(code="b")], [Tag(word="RED"), Tag(word="GREEN")]
    session.add_all([*codes, *tags])
    work.enqueue(session, codes, tags)
    cyclone_env.run_until_idle()
    assert seen == ["a", "b", "red", "green"]


def test_what_the_action_does_to_it_commits_with_its_completion(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(account: Account) -> None:  # and takes no Context
        account.name += "!"

    (account,) = added(session, Account(name="a"))
    job = cyclone_env.run(work.enqueue(session, account))
    assert job.state == "completed"
    assert json.loads(job.arguments) == {"account": account.id}
    assert names(session) == ["a!"]


def test_if_the_action_fails_nothing_of_it_stays(cyclone_env: CycloneEnv, session: Session) -> None:
    @action
    def work(account: Account) -> None:
        account.name += "!"
        raise ValueError("it broke")

    job = cyclone_env.run(work.enqueue(session, *added(session, Account(name="a"))))
    assert job.waits_for == "retry"
    assert names(session) == ["a"]


def test_a_row_is_what_it_was_stored_as_with_its_own_columns(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    seen: list[Any] = []

    @action
    def work(staff: list[Employee], boss: Employee) -> None:
        with selects_from(Manager) as of_managers, selects_from(Employee) as of_all:
            seen.extend(
                (type(e), getattr(e, "budget", None), getattr(e, "school", None)) for e in staff
            )
            seen.append(boss.budget)  # type: ignore[attr-defined]
        assert of_managers + of_all == []

    manager, intern, plain = added(session, Manager(budget=7), Intern(school="s"), Employee())
    job = cyclone_env.run(work.enqueue(session, [plain, intern, manager], boss=manager))
    assert (job.state, job.last_error) == ("completed", None)
    assert seen == [(Employee, None, None), (Intern, None, "s"), (Manager, 7, None), 7]


def test_many_rows_are_loaded_with_few_statements_in_their_order(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    seen: list[int] = []

    @action
    def work(first: Account, accounts: list[Account]) -> None:
        seen.extend(account.id for account in [first, *accounts])

    session.execute(sa.insert(Account), [{"name": ""}] * 1_200)
    ids = list(session.scalars(sa.select(Account.id).order_by(Account.id)))
    order = [*reversed(ids), *ids[:3]]
    ref = cyclone.enqueue(session, work.kind, {"first": order[0], "accounts": order})
    with selects_from(Account) as sent:
        cyclone_env.run(ref)
    assert seen == [order[0], *order]
    assert len(sent) == 3


def test_rows_may_be_anywhere_in_containers(cyclone_env: CycloneEnv, session: Session) -> None:
    seen: list[Any] = []

    @action
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

    a, b = added(session, Account(name="a"), Account(name="b"))
    cyclone_env.run(work.enqueue(session, {"x": [a, None, b], "y": []}, (b, 2), b, a, z=a))
    assert seen == [{"x": ["a", None, "b"], "y": []}, ("b", 2), ["b", "a"], {"z": "a"}]


def test_a_run_may_pass_on_a_row_that_it_has_just_made(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(ctx: Context, account: Account, more: int) -> None:
        if more:
            child = Account(name=account.name + "a")
            ctx.session.add(child)
            cyclone.enqueue(ctx.session, work.kind, {"account": child, "more": more - 1})

    work.enqueue(session, *added(session, Account(name="a")), more=2)
    assert cyclone_env.run_until_idle() == 3
    assert names(session) == ["a", "aa", "aaa"]


# ---- it does not ---------------------------------------------------------------------------------


def test_a_job_whose_row_has_gone_is_discarded_with_its_name(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(accounts: list[Account]) -> None:
        raise AssertionError("one of them is gone")

    a, b = added(session, Account(name="a"), Account(name="b"))
    ref = work.enqueue(session, [a, b])
    reason = f"accounts[1]: the Account with the primary key {b.id} is gone"
    session.delete(b)
    job = cyclone_env.run(ref)
    (entry,) = cyclone_env.history(job)
    assert job.state == "discarded"
    assert reason in (entry.error or "")
    assert reason in (job.last_error or "")


def test_a_composite_key_that_has_gone_is_named_whole(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(price: Price) -> None:
        raise AssertionError("it is gone")

    job = cyclone_env.run(cyclone.enqueue(session, work.kind, {"price": ["tea", "2024-02-29"]}))
    assert job.state == "discarded"
    assert 'the primary key ["tea","2024-02-29"]' in (job.last_error or "")


def test_a_row_that_became_of_another_class_is_gone(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(boss: Manager) -> None:
        raise AssertionError("it is no Manager")

    (intern,) = added(session, Intern(school="s"))
    job = cyclone_env.run(cyclone.enqueue(session, work.kind, {"boss": intern.id}))
    assert job.state == "discarded"
    assert f"boss: the Manager with the primary key {intern.id} is gone" in (job.last_error or "")


def test_an_action_may_be_given_none_for_what_has_gone(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    seen: list[Any] = []

    def work(account: Account | None, accounts: list[Account | None]) -> None:
        seen.append(account)
        seen.append([a and a.name for a in accounts])

    a, b = added(session, Account(name="a"), Account(name="b"))
    ref = action(work, missing="none").enqueue(session, b, [a, b, a])
    session.delete(b)
    cyclone_env.run(ref)
    assert seen == [None, ["a", None, "a"]]


def test_arguments_that_this_code_can_not_read_are_refused_without_a_look_at_rows(
    cyclone_env: CycloneEnv, session: Session
) -> None:
    @action
    def work(account: Account) -> None:
        raise AssertionError("it has no number")

    spec = work.job(*added(session, Account())).carrying('{"account":"x"}')
    ref = cyclone.enqueue_spec(session, spec)
    with selects_from(Account) as sent:
        job = cyclone_env.run(ref)
    assert job.state == "discarded"
    told = f"can't read the job's arguments: {work.kind}: account: Input should be a valid integer"
    assert told in (job.last_error or "")
    assert sent == []

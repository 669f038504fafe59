"""Calls that type checkers accept, and the types that they see. Importing it registers actions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ParamSpec, TypeVar, assert_type

from pydantic import JsonValue
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from cyclone_sqla import (
    Action,
    BulkReport,
    Context,
    Cyclone,
    Explanation,
    Exponential,
    Job,
    JobFilter,
    JobRef,
    JobSpec,
)
from cyclone_sqla.figures import HaltedSequence, Stats

P = ParamSpec("P")
R = TypeVar("R")

cyclone = Cyclone()


@dataclass
class Row:
    """An argument of the application's own."""

    name: str
    amount: Decimal = Decimal(0)


class Base(DeclarativeBase):
    """The application's own."""


class Account(Base):
    """A mapped class: instances are arguments."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "type", "polymorphic_identity": "plain"}  # noqa: RUF012


class Savings(Account):
    """A subclass of it."""

    __mapper_args__ = {"polymorphic_identity": "savings"}  # noqa: RUF012


class MySession(Session):
    """A session of the application's own."""


class MyAsyncSession(AsyncSession):
    """An async session of the application's own."""


@cyclone.action
def bare(account: int, amount: Decimal) -> None:
    """Decorated without parentheses."""


@cyclone.action
def bare_with_context(ctx: Context, account: int, amount: Decimal) -> Decimal:
    """Decorated without parentheses; the Context is no argument of a job."""
    return amount if ctx.attempt == 1 else Decimal(0)


@cyclone.action()
def empty() -> None:
    """No parameters at all."""


@cyclone.action(queue="ledger", max_attempts=8, timeout=30, backoff=Exponential(base=2))
def with_options(ctx: Context, account: int, amount: Decimal = Decimal(1)) -> str:
    """Decorated with options."""
    return f"{ctx.lease}: {account}, {amount}"


@cyclone.action(kind="async.fetch", discard_on=(ValueError,), retry_on=(OSError,))
async def fetch(ctx: Context, url: str, *, depth: int = 0) -> bytes:
    """An async action."""
    return url.encode() * (depth + ctx.attempt)


@cyclone.action
async def ping(host: str) -> None:
    """An async action without the Context."""


@cyclone.action
def all_kinds(a: int, /, b: str = "", *rest: int, c: Row | None = None, **more: Decimal) -> None:
    """Every kind of parameter."""


@cyclone.action
def shadowing(target: int, session: str, queue: str, args: int, kwargs: int, fn: int) -> None:
    """Parameters with the names of our own."""


@cyclone.action
def free_json(data: Mapping[str, JsonValue], n: int) -> None:
    """JSON of any shape, checked by both."""


@cyclone.action
def free_any(ctx: Context, n: int, *, data: object) -> None:
    """Anything, as a keyword."""


@cyclone.action
def of_rows(rows: list[Row], by_name: dict[str, Row]) -> None:
    """Containers of classes of the application."""


@cyclone.action
def pay(ctx: Context, account: Account, amount: Decimal) -> None:
    """A row, which arrives loaded."""
    assert_type(account.id, int)
    assert_type(ctx.session.get(Account, account.id), Account | None)


@cyclone.action(missing="none")
async def audit(
    accounts: list[Account | None], owner: Account | None, *more: Account | None
) -> int:
    """Rows, of which some may have gone."""
    return len([account.id for account in (*accounts, *more) if account])


class Jobs:
    """Actions may be static methods."""

    @cyclone.action(kind="jobs.mail")
    @staticmethod
    def mail(to: str) -> None:
        """An action in a class."""


class Service:
    """A callable object."""

    def __call__(self, ctx: Context, n: int) -> None:
        """What the action does."""


class AsyncService:
    """A callable object that waits."""

    async def __call__(self, n: int) -> str:
        """What the action does."""
        return str(n)


service = cyclone.action(kind="service")(Service())
async_service = cyclone.action(kind="service.async")(AsyncService())


def logged(fn: Callable[P, R]) -> Callable[P, R]:
    """A decorator that keeps the signature."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    return wrapper


@cyclone.action(kind="decorated")
@logged
def decorated(ctx: Context, n: int) -> int:
    """An action beneath a decorator."""
    return n + ctx.attempt


def what_an_action_is() -> None:
    """P is the signature without the Context, R what the function returns."""
    assert_type(empty, Action[[], None])
    assert_type(with_options.kind, str)
    assert_type(with_options.timeout, timedelta | None)


def sync_targets(
    session: Session,
    mine: MySession,
    scoped: scoped_session[Session],
    connection: Connection,
) -> None:
    """A synchronous target answers at once."""
    assert_type(bare.enqueue(session, 1, Decimal(1)), JobRef)
    assert_type(bare.enqueue(mine, account=1, amount=Decimal(1)), JobRef)
    assert_type(bare_with_context.enqueue(scoped, 1, amount=Decimal(1)), JobRef)
    assert_type(with_options.enqueue(connection, 1), JobRef)
    assert_type(fetch.enqueue(session, "u", depth=2), JobRef)
    assert_type(ping.enqueue(session, host="h"), JobRef)
    assert_type(empty.enqueue(session), JobRef)


async def async_targets(
    session: AsyncSession,
    mine: MyAsyncSession,
    scoped: async_scoped_session[AsyncSession],
    connection: AsyncConnection,
) -> None:
    """An asynchronous target is awaited."""
    assert_type(await bare.enqueue(session, 1, Decimal(1)), JobRef)
    assert_type(await bare_with_context.enqueue(mine, 1, amount=Decimal(1)), JobRef)
    assert_type(await with_options.enqueue(scoped, 1), JobRef)
    assert_type(await fetch.enqueue(connection, "u"), JobRef)
    assert_type(await session.run_sync(lambda s: bare.enqueue(s, 1, Decimal(1))), JobRef)
    async with asyncio.TaskGroup() as group:
        assert_type(group.create_task(ping.enqueue(session, "h")), asyncio.Task[JobRef])


def either_target(target: Session | AsyncSession) -> None:
    """A union comes back for a union."""
    assert_type(ping.enqueue(target, "h"), JobRef | Coroutine[Any, Any, JobRef])


def arguments(session: Session, anything: Any) -> None:
    """Every way to pass an argument that Python has."""
    all_kinds.enqueue(session, 1)
    all_kinds.enqueue(session, 1, "b", 2, 3, c=Row("a"), x=Decimal(1), y=Decimal(2))
    shadowing.enqueue(session, target=1, session="s", queue="q", args=1, kwargs=2, fn=3)
    free_json.enqueue(session, {"a": [1, None, {"b": "c"}]}, n=1)
    free_any.enqueue(session, 1, data={"a": 1})
    of_rows.enqueue(session, [Row("a")], by_name={"b": Row("b")})
    Jobs.mail.enqueue(session, to="me")
    service.enqueue(session, 1)
    async_service.enqueue(session, n=1)
    decorated.enqueue(session, n=1)
    bare.enqueue(session, anything, anything)


def rows(session: Session, account: Account, savings: Savings, ctx: Context) -> None:
    """What the action gets is what the enqueue takes: instances, also of subclasses."""
    assert_type(pay.enqueue(session, account, Decimal(1)), JobRef)
    assert_type(pay.using(priority=1).enqueue(session, account=savings, amount=Decimal(1)), JobRef)
    assert_type(pay.job(savings, amount=Decimal(1)), JobSpec)
    assert_type(audit.enqueue(session, [account, savings, None], None, savings), JobRef)
    assert_type(cyclone.enqueue(session, "pay", {"account": account, "amount": Decimal(1)}), JobRef)
    pay(ctx, account, Decimal(1))


async def rows_async(session: AsyncSession, account: Account) -> None:
    """The same, awaited."""
    assert_type(await pay.enqueue(session, account, amount=Decimal(1)), JobRef)
    assert_type(await audit([account, None], account), int)


def enqueuing_as_a_callable(session: Session) -> None:
    """What an action offers can be passed on."""
    mail: Callable[[Session, str], JobRef] = Jobs.mail.enqueue
    mail(session, "me")
    with sessionmaker(create_engine("sqlite://")).begin() as begun:
        assert_type(ping.enqueue(begun, "h"), JobRef)


def options(session: Session) -> None:
    """Options stand beside the arguments, never among them."""
    bound = bare.using(
        queue="ledger",
        priority=-1,
        unique="order:1",
        on_duplicate="return",
        idempotency_key="k",
        process_in=timedelta(hours=1),
        process_at=None,
        deadline=datetime.now(UTC),
        max_attempts=3,
        timeout=1.5,
        tenant="t",
        trace_id="i",
        headers={"a": "b"},
    )
    assert_type(bound.enqueue(session, 1, amount=Decimal(1)), JobRef)
    assert_type(bound.using(priority=1).job(1, Decimal(1)), JobSpec)
    assert_type(bare.using(process_in=5).job(account=1, amount=Decimal(1)), JobSpec)


def many(session: Session) -> None:
    """Jobs of different actions in one list."""
    jobs = [bare.job(1, Decimal(1)), ping.using(priority=1).job("h"), empty.job()]
    assert_type(jobs, list[JobSpec])
    assert_type(cyclone.enqueue_many(session, jobs, on_duplicate="return"), list[JobRef])
    assert_type(cyclone.enqueue_many(session, (empty.job() for _ in range(3))), list[JobRef])


async def many_async(session: AsyncSession) -> None:
    """The same, awaited."""
    assert_type(await cyclone.enqueue_many(session, [empty.job()]), list[JobRef])


def by_name(session: Session) -> None:
    """A producer without the code."""
    ref = cyclone.enqueue(session, "bare", {"account": 1, "amount": "1"}, queue="ledger")
    assert_type(ref, JobRef)
    assert_type(cyclone.get(session, ref.id), Job)


async def by_name_async(session: AsyncSession) -> None:
    """The same, awaited."""
    ref = await cyclone.enqueue(session, "bare", {"account": 1}, process_in=1)
    assert_type(ref, JobRef)
    assert_type(await cyclone.get(session, ref.id), Job)


def looks(session: Session) -> None:
    """What there is, and why it waits."""
    assert_type(cyclone.get(session, sequence="s", position=1), Job)
    assert_type(cyclone.explain(session, 1), Explanation)
    assert_type(cyclone.explain(session, 1).reasons[0].code, str)
    assert_type(cyclone.jobs(session, JobFilter(state="paused"), limit=5), list[Job])
    assert_type(cyclone.halted_sequences(session), list[HaltedSequence])
    assert_type(cyclone.stats(session), Stats)
    assert_type(cyclone.replay_many(session, JobFilter(kind="bare"), preview=True), BulkReport)


async def looks_async(session: AsyncSession) -> None:
    """The same, awaited."""
    assert_type(await cyclone.get(session, sequence="s", position=1), Job)
    assert_type(await cyclone.explain(session, 1), Explanation)
    assert_type(await cyclone.jobs(session), list[Job])
    assert_type(await cyclone.reschedule_many(session, JobFilter(), process_in=1), BulkReport)


def direct_calls(ctx: Context) -> None:
    """A unit test calls the function; the Context comes first."""
    assert_type(bare_with_context(ctx, 1, amount=Decimal(1)), Decimal)
    assert_type(decorated(ctx, 1), int)
    bare(1, Decimal(1))
    all_kinds(1, "b", 2, c=None, x=Decimal(1))


async def awaited_calls(ctx: Context) -> None:
    """Calling an async action gives its coroutine."""
    waiting: Coroutine[Any, Any, bytes] = fetch(ctx, "u")
    assert_type(await waiting, bytes)
    assert_type(await async_service(1), str)
    await ping("h")

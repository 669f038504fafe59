"""Calls that both type checkers must report: an ignore that is not needed is an error itself."""
# ruff: noqa: E501, T201

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from cyclone_sqla import Context, Cyclone, JobRef
from tests.typing.accepted import (
    Account,
    Jobs,
    Row,
    all_kinds,
    audit,
    bare,
    bare_with_context,
    cyclone,
    fetch,
    free_json,
    of_rows,
    pay,
    ping,
)


def arguments(session: Session, ctx: Context) -> None:
    """Each argument against the signature."""
    bare.enqueue(session, 1, "1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.enqueue(session, "1", Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.enqueue(session, account=1, amount=1.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.enqueue(session, 1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session, 1, Decimal(1), 2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session, 1, Decimal(1), note="a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session, 1, Decimal(1), queue="ledger")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(session, 1, account=1, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fetch.enqueue(session, "u", 2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    all_kinds.enqueue(session, a=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    all_kinds.enqueue(session, 1, "b", "c")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    all_kinds.enqueue(session, 1, x=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    of_rows.enqueue(session, [None], {})  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    of_rows.enqueue(session, [Row("a")], {1: Row("b")})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    free_json.enqueue(session, {"a": Decimal(1)}, 1)  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    free_json.enqueue(session, {}, "n")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Jobs.mail.enqueue(session, to=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare_with_context.enqueue(session, ctx, 1, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare_with_context.enqueue(session, ctx=ctx, account=1, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare_with_context.job(ctx, 1, Decimal(1))  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    bare.job(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    bare.job(1, "1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def rows(session: Session, account: Account, row: Row) -> None:
    """An instance, not its key and not another class's."""
    pay.enqueue(session, 1, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    pay.enqueue(session, row, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    pay.enqueue(session, None, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    pay.enqueue(session, account=Account, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    pay.job(1, Decimal(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    audit.enqueue(session, [1], None)  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    audit.enqueue(session, account, None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cyclone.action(missing="ignore")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def targets(session: Session, engine: Engine, ctx: Context) -> None:
    """The target is there, first, and can hold a transaction."""
    bare.enqueue(1, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(account=1, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.enqueue(engine, 1, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.enqueue(ctx, 1, Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.enqueue(target=session, account=1, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def awaits(session: AsyncSession) -> None:
    """A forgotten await."""
    bare.enqueue(session, 1, Decimal(1))  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    bare.using(priority=1).enqueue(session, 1, Decimal(1))  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    cyclone.enqueue_many(session, [])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    cyclone.enqueue(session, "bare", {})  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


def sync_code_with_an_async_session(session: AsyncSession) -> JobRef:
    """The answer is used without an await."""
    print(bare.enqueue(session, 1, Decimal(1)).id)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
    return bare.enqueue(session, 1, Decimal(1))  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def options(session: Session) -> None:
    """Each option by its name and type."""
    bare.using(prioritty=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    bare.using(priority="high")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bare.using(queue=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bare.using(on_duplicate="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bare.using(process_in="1h")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bare.using(headers={"a": 1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    bare.using(1)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    bare.using(priority=1).enqueue(session, 1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare.using(priority=1).enqueue(session, 1, "1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    bare.using(priority=1).job(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    cyclone.enqueue(session, "bare", {}, prioritty=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def many(session: Session, numbers: Sequence[int]) -> None:
    """Jobs, not actions."""
    cyclone.enqueue_many(session, [bare])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cyclone.enqueue_many(session, [bare.using(priority=1)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cyclone.enqueue_many(session, bare.job(1, Decimal(1)))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cyclone.enqueue_many(session, numbers)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cyclone.enqueue_many(session, [], on_duplicate="ignore")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def direct_calls(ctx: Context) -> None:
    """The Context comes first, by position."""
    bare_with_context(ctx=ctx, account=1, amount=Decimal(1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    bare_with_context(ctx, 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    bare_with_context(ctx, 1, "1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    ping(1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportUnusedCoroutine]


def registration(app: Cyclone) -> None:
    """Options of the decorator."""
    app.action(kue="ledger")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    app.action(max_attempts="8")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    app.action(1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def erased(session: Session) -> None:
    """mypy checks nothing of a signature with an explicit Any; see ``free_json`` for the way out."""

    @cyclone.action
    def with_any(ctx: Context, data: dict[str, Any], n: int) -> None:
        """Any inside."""

    with_any.enqueue(session, {}, "n")  # pyright: ignore[reportArgumentType, reportCallIssue]

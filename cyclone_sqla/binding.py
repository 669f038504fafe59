"""Runs a synchronous body on whatever the caller works with: a Session, a Connection, or their
async kin.

The body is written once, for a Core :class:`~sqlalchemy.Connection` inside the caller's
transaction. A synchronous target runs it at once; an asynchronous one gives back a coroutine that
runs it through ``run_sync``. The Session is not flushed: an application's pending objects stay
pending.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from cyclone_sqla.errors import ConfigurationError, TransactionError

T = TypeVar("T")

SyncTarget: TypeAlias = "Session | scoped_session[Any] | Connection"
AsyncTarget: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"

_UNAWAITED = "cyclone_unawaited"


def run(
    target: SyncTarget | AsyncTarget,
    work: Callable[[Connection, Session | None], T],
    mapper: type[Any],
) -> T | Coroutine[Any, Any, T]:
    """Run ``work(connection, session)`` in the target's transaction: now, or in the returned
    coroutine.

    ``mapper`` is the mapped class by which a Session with several engines finds the right one.
    """
    if isinstance(target, scoped_session):
        target = cast("Session", target.registry())
    if isinstance(target, Session):
        return work(_connection_of(target, mapper), target)
    if isinstance(target, Connection):
        return work(target, None)
    return _run_async(target, work, mapper)


def _run_async(
    target: AsyncTarget, work: Callable[[Connection, Session | None], T], mapper: type[Any]
) -> Coroutine[Any, Any, T]:
    try:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    except ImportError:  # greenlet is not installed, so nobody can have an async target
        raise _unfit(target) from None
    if isinstance(target, async_scoped_session):
        target = cast("AsyncSession", target.registry())
    if isinstance(target, AsyncConnection):
        return target.run_sync(lambda connection: work(connection, None))
    # Not everybody uses a type checker.
    if not isinstance(target, AsyncSession):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unfit(target)
    coroutine = target.run_sync(lambda session: work(_connection_of(session, mapper), session))
    _watch(target.sync_session, coroutine)
    return coroutine


def _unfit(target: object) -> ConfigurationError:
    return ConfigurationError(
        "enqueue needs a Session, a Connection or one of their async kin, "
        f"not {type(target).__name__}"
    )


def _connection_of(session: Session, mapper: type[Any]) -> Connection:
    """The session's connection for our tables, also when its engines are given per class."""
    try:
        return session.connection(bind_arguments={"mapper": mapper})
    except UnboundExecutionError:
        attributes = vars(session)  # the public name is of SQLAlchemy 2.1, the mangled one of 2.0
        binds: dict[Any, Engine] = (
            attributes.get("binds") or attributes.get("_Session__binds") or {}
        )
        engines = set(binds.values())
        if len(engines) != 1:
            raise ConfigurationError(
                "this Session does not know which database holds the jobs: give it "
                f"bind=engine, or binds={{{mapper.__name__}: engine}}"
            ) from None
        return session.connection(bind_arguments={"bind": engines.pop()})


def _watch(session: Session, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Remember an enqueue that may never be awaited: the commit must not lose it silently."""
    waiting: list[Coroutine[Any, Any, Any]] | None = session.info.get(_UNAWAITED)
    if waiting is None:
        waiting = session.info[_UNAWAITED] = []
        event.listen(session, "before_commit", _refuse_unawaited)
    waiting[:] = [c for c in waiting if _is_unawaited(c)]
    waiting.append(coroutine)


def _refuse_unawaited(session: Session) -> None:
    if session.in_nested_transaction():
        return  # before_commit also fires when a savepoint is released
    forgotten = [c for c in session.info[_UNAWAITED] if _is_unawaited(c)]
    session.info[_UNAWAITED].clear()
    if forgotten:
        for coroutine in forgotten:
            coroutine.close()
        raise TransactionError(
            f"{len(forgotten)} enqueue call(s) on this AsyncSession were never awaited, so their "
            "jobs are missing from the transaction: write `await action.enqueue(session, …)`. "
            "Nothing was committed."
        )


def _is_unawaited(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED

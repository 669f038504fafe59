"""Runs a synchronous body on whatever the caller works with: a Session, a Connection, or their
async kin.

The body is written once, for a Core :class:`~sqlalchemy.Connection` inside the caller's
transaction. A synchronous target runs it at once; an asynchronous one gives back a coroutine that
runs it through ``run_sync``. The Session is not flushed, unless the body needs what is pending in
it: an application's pending objects stay pending.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, event, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction, class_mapper, scoped_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from cyclone_sqla.errors import ConfigurationError, TransactionError

T = TypeVar("T")

SyncTarget: TypeAlias = "Session | scoped_session[Any] | Connection"
AsyncTarget: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"

Work: TypeAlias = "Callable[[Connection, Session | None], T]"
"""A body: it is given the connection and, if the caller works with one, the session."""


def run(
    target: SyncTarget | AsyncTarget,
    work: Work[T],
    mapper: type[Any],
    lost: str | None = None,
    *,
    flush: bool = False,
) -> T | Coroutine[Any, Any, T]:
    """Run ``work`` in the target's transaction: now, or in the returned coroutine.

    ``mapper`` is the mapped class by which a Session with several engines finds the right one.
    ``lost`` says what a transaction would lack if the coroutine was never awaited. With ``flush``
    a Session is flushed first.
    """
    if isinstance(target, scoped_session):
        target = cast("Session", target.registry())
    if isinstance(target, Session):
        return run_in_session(target, work, mapper, flush=flush)
    if isinstance(target, Connection):
        return _work_on(target, None, work)
    return _run_async(target, work, mapper, lost, flush)


def session_of(target: SyncTarget | AsyncTarget | None) -> Session | None:
    """The Session that a target is, or has behind it; None for a connection."""
    held: Any = target
    if hasattr(held, "registry"):
        held = held.registry()
    held = getattr(held, "sync_session", held)
    return held if isinstance(held, Session) else None


def _run_async(
    target: AsyncTarget, work: Work[T], mapper: type[Any], lost: str | None, flush: bool
) -> Coroutine[Any, Any, T]:
    try:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    except ImportError:  # greenlet is not installed, so nobody can have an async target
        raise _unfit(target) from None
    if isinstance(target, async_scoped_session):
        target = cast("AsyncSession", target.registry())
    if isinstance(target, AsyncConnection):
        return target.run_sync(lambda connection: _work_on(connection, None, work))
    # Not everybody uses a type checker.
    if not isinstance(target, AsyncSession):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unfit(target)
    coroutine = target.run_sync(lambda session: run_in_session(session, work, mapper, flush=flush))
    if lost is not None:
        _watch(target.sync_session, coroutine, lost)
    return coroutine


def run_in_session(session: Session, work: Work[T], mapper: type[Any], *, flush: bool = False) -> T:
    """Run ``work`` in the transaction of a synchronous session."""
    if flush:  # before the translation of schemas, which its statements need, is put aside
        session.flush()
    return _work_on(connection_of(session, mapper), session, work)


def _work_on(connection: Connection, session: Session | None, work: Work[T]) -> T:
    """The library knows its own schema: the application's translation of schemas is not for it."""
    theirs = connection.get_execution_options().get("schema_translate_map")
    if not theirs:
        return work(connection, session)
    connection.execution_options(schema_translate_map=None)
    try:
        return work(connection, session)
    finally:
        connection.execution_options(schema_translate_map=theirs)


def _unfit(target: object) -> ConfigurationError:
    return ConfigurationError(
        "enqueue needs a Session, a Connection or one of their async kin, "
        f"not {type(target).__name__}"
    )


def connection_of(session: Session, mapper: type[Any]) -> Connection:
    """The session's connection for our tables, also when its engines are given per class.

    A Session that routes by statement is shown a write: what reads a job reads it where it was
    enqueued. One that routes by itself expects a mapper, not its class.
    """
    try:
        return session.connection(bind_arguments={**_a_write(cast("Hashable", mapper))})
    except UnboundExecutionError:
        attributes = vars(session)  # the public name is of SQLAlchemy 2.1, the mangled one of 2.0
        binds: dict[Any, Engine] = (
            attributes.get("binds") or attributes.get("_Session__binds") or {}
        )
        engines = set(binds.values())
        if len(engines) != 1:
            raise ConfigurationError(
                "this Session does not know which database holds the jobs: give it "
                "bind=engine, or binds={cyclone.job_class: engine}"
            ) from None
        return session.connection(bind_arguments={"bind": engines.pop()})


@cache
def _a_write(mapper: Any) -> dict[str, Any]:
    return {"mapper": class_mapper(mapper, configure=False), "clause": update(mapper)}


# ---- an enqueue that was never awaited -----------------------------------------------------------

_UNAWAITED = "cyclone_unawaited"

_Waiting: TypeAlias = "list[tuple[Coroutine[Any, Any, Any], str]]"
"""Coroutines, each with what is lost if it never runs."""


def _watch(session: Session, coroutine: Coroutine[Any, Any, Any], lost: str) -> None:
    """Remember an enqueue that may never be awaited: the commit must not lose it silently."""
    waiting: _Waiting = session.info.setdefault(_UNAWAITED, [])
    waiting[:] = [entry for entry in waiting if _is_unawaited(entry[0])]
    waiting.append((coroutine, lost))


# Once for all sessions: to listen to one costs 20 µs, and many live for a single commit.
@event.listens_for(Session, "before_commit")
def _refuse_unawaited(session: Session) -> None:
    if _UNAWAITED not in session.info or session.in_nested_transaction():
        return  # the event also comes when a savepoint is released
    waiting: _Waiting = session.info.pop(_UNAWAITED)
    forgotten = [entry for entry in waiting if _is_unawaited(entry[0])]
    for coroutine, _ in forgotten:
        coroutine.close()
    if forgotten:
        raise TransactionError(
            "On this AsyncSession an enqueue was never awaited, so the transaction lacks "
            f"{', '.join(lost for _, lost in forgotten)}: write `await action.enqueue(session, …)`."
            " Nothing was committed."
        )


@event.listens_for(Session, "after_soft_rollback")
def _forget_unawaited(session: Session, ended: SessionTransaction) -> None:
    """Python itself warns of those: what they would have added is rolled back anyway."""
    if ended.parent is None:
        session.info.pop(_UNAWAITED, None)


def _is_unawaited(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED

"""Every way into the queue: each kind of session and connection, on each driver.

A test is written once, as if everything were asynchronous; `settled` lets it use the synchronous
kinds too.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from cyclone_sqla import begin_before_savepoints
from tests.databases import Database
from tests.shop import settled

T = TypeVar("T")

SYNC_KINDS = ("Session", "scoped_session", "Connection")
ASYNC_KINDS = ("AsyncSession", "async_scoped_session", "AsyncConnection")

KINDS = {
    "psycopg": SYNC_KINDS,
    "psycopg2": SYNC_KINDS,
    "psycopg_async": ASYNC_KINDS,
    "asyncpg": ASYNC_KINDS,
    "pysqlite": SYNC_KINDS,
    "aiosqlite": ASYNC_KINDS,
}
"""The kinds of target of each driver."""

SQLITE_DRIVERS = ("pysqlite", "aiosqlite")


def drivers(*names: str) -> list[Any]:
    """Parameters of a test, each with the mark of its database."""
    marks = {name: "sqlite" if name in SQLITE_DRIVERS else "postgresql" for name in names}
    return [pytest.param(name, marks=getattr(pytest.mark, mark)) for name, mark in marks.items()]


@dataclass(frozen=True)
class Door:
    """One kind of target on one driver."""

    database: Database
    driver: str
    kind: str

    def run(self, story: Callable[[Any], Awaitable[T]], **options: Any) -> T:
        """What `story` returns: it is given a new target, on an engine with these options."""

        async def told() -> T:
            async with self.target(**options) as target:
                return await story(target)

        return asyncio.run(told())

    @asynccontextmanager
    async def target(self, **options: Any) -> AsyncIterator[Any]:
        """A new target, on an engine of its own with these options."""
        create: Any = create_async_engine if self.kind in ASYNC_KINDS else create_engine
        engine = create(self.database.url_for(self.driver), poolclass=NullPool, **options)
        if self.driver in SQLITE_DRIVERS:
            begin_before_savepoints(engine)
        target = await settled(_new_target(self.kind, engine))
        try:
            yield target
        finally:
            await settled(target.close())
            await settled(engine.dispose())


def _new_target(kind: str, engine: Any) -> Any:
    match kind:
        case "Session":
            return Session(engine)
        case "scoped_session":
            return scoped_session(sessionmaker(engine))
        case "AsyncSession":
            return AsyncSession(engine)
        case "async_scoped_session":
            sessions = async_sessionmaker(engine)
            return async_scoped_session(sessions, scopefunc=asyncio.current_task)
        case _:
            return engine.connect()

"""Where the sessions of actions come from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from cyclone_sqla.dialects import Dialect

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

log = logging.getLogger("cyclone_sqla.worker")


class Sessions:
    """Makes sessions as the application's own sessionmaker does, for the database of its jobs.

    ``source`` is what the application gave as its database. A sync sessionmaker or Engine is used
    as it is, with its pool, so that everything which the application tied to them holds; what they
    can't serve (actions of the other kind, a URL, SQLite's way of beginning) gets an engine of the
    worker's own. ``size`` bounds how many of its connections are in use at the same time.
    """

    def __init__(
        self, dialect: Dialect, source: Any, database: Engine | sa.URL, *, size: int
    ) -> None:
        self._dialect = dialect
        self._source = source
        self._database = database
        self._size = size
        self._own: Engine | None = None
        self._own_async: AsyncEngine | None = None
        self._lock = threading.Lock()

    def open(self) -> Session:
        """A new session for a sync action."""
        with self._lock:
            make = self._make
        return make()

    def open_async(self) -> AsyncSession:
        """A new session for an async action; called in the event loop."""
        return self._make_async()

    @property
    def application_pool(self) -> QueuePool | None:
        """The pool that sync actions share with the application, if it is one with bounds."""
        engine = self._application_engine()
        return engine.pool if engine is not None and isinstance(engine.pool, QueuePool) else None

    def dispose(self) -> None:
        """Close the connections of the worker's own engine for sync actions."""
        if self._own is not None:
            self._own.dispose()

    async def dispose_async(self) -> None:
        """Close those of its engine for async actions: in the event loop in which they run."""
        if self._own_async is not None:
            await self._own_async.dispose()

    @cached_property
    def _make(self) -> Callable[[], Session]:
        is_factory = isinstance(self._source, sessionmaker)
        factory: sessionmaker[Session] = self._source if is_factory else sessionmaker()
        engine = self._application_engine()
        if engine is not None:
            return factory if is_factory else partial(factory, bind=engine)
        self._own = self._dialect.session_engine(self._database, self._size)
        return partial(factory, bind=self._own)

    @cached_property
    def _make_async(self) -> Callable[[], AsyncSession]:
        self._own_async = self._dialect.async_session_engine(self._database, self._size)
        from sqlalchemy.ext.asyncio import async_sessionmaker

        is_factory = isinstance(self._source, async_sessionmaker)
        factory = self._source if is_factory else async_sessionmaker(expire_on_commit=False)
        return partial(factory, bind=self._own_async)

    def _application_engine(self) -> Engine | None:
        """The application's engine, if sync actions can use it as it is."""
        engine = self._database if isinstance(self._database, Engine) else None
        if engine is None or engine.dialect.is_async or self._dialect.one_writer:
            return None
        return engine


def warn_of_a_small_pool(sessions: Sessions, runs: int) -> None:
    """Say so if ``runs`` sync actions can't all have a connection of the application's pool."""
    pool = sessions.application_pool
    beyond: int = getattr(pool, "_max_overflow", -1)
    if pool is None or beyond < 0 or pool.size() + beyond >= runs:
        return
    log.warning(
        "up to %d sync actions run at a time, and the application's pool has %d connections: those "
        "that use ctx.session beyond that wait for one. Give create_engine() a larger pool_size, "
        "or the worker fewer slots.",
        runs,
        pool.size() + beyond,
    )

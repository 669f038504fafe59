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
from cyclone_sqla.urls import url_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

log = logging.getLogger("cyclone_sqla.worker")


class Sessions:
    """Makes sessions as the application's own sessionmaker does, for the database of its jobs.

    ``source`` is what the application gave as its database, ``database`` where the worker finds its
    jobs. A sync sessionmaker or Engine is used as it is, with its pool, so that everything which
    the application tied to them holds. What they can't serve (actions of the other kind, a URL,
    another database than theirs, SQLite's way of beginning) gets an engine of the worker's own.
    ``size`` bounds how many of its connections are in use at the same time.
    """

    def __init__(
        self,
        dialect: Dialect,
        source: Callable[[], Any],
        database: Engine | sa.URL,
        *,
        size: int,
    ) -> None:
        self._dialect = dialect
        self._find_source = source
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
        engine = self._shared
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
        if self._shared is not None:
            return factory if is_factory else partial(factory, bind=self._shared)
        self._own = self._dialect.session_engine(self._like, self._size)
        return partial(factory, bind=self._own.execution_options(**self._options))

    @cached_property
    def _make_async(self) -> Callable[[], AsyncSession]:
        self._own_async = self._dialect.async_session_engine(self._like, self._size)
        from sqlalchemy.ext.asyncio import async_sessionmaker

        is_factory = isinstance(self._source, async_sessionmaker)
        factory = self._source if is_factory else async_sessionmaker(expire_on_commit=False)
        return partial(factory, bind=self._own_async.execution_options(**self._options))

    @cached_property
    def _source(self) -> Any:
        return self._find_source()

    @cached_property
    def _engine(self) -> Engine | None:
        """The application's engine, if it leads to the database of the jobs."""
        source = self._source
        engine = getattr(source, "kw", {}).get("bind", source)
        engine = getattr(engine, "sync_engine", engine)
        if not isinstance(engine, Engine):
            return None
        return engine if _place_of(engine.url) == _place_of(url_of(self._database)) else None

    @property
    def _shared(self) -> Engine | None:
        """The application's engine, if sync actions can use it as it is."""
        engine = self._engine
        if engine is None or engine.dialect.is_async or self._dialect.one_writer:
            return None
        return engine

    @property
    def _like(self) -> Engine | sa.URL:
        """What an engine of the worker's own connects like."""
        return self._engine if self._engine is not None else self._database

    @property
    def _options(self) -> dict[str, Any]:
        """How the application translates its schemas."""
        if self._engine is None:
            return {}
        options = self._engine.get_execution_options()
        return {name: options[name] for name in ("schema_translate_map",) if name in options}


def _place_of(url: sa.URL) -> tuple[object, ...]:
    return url.get_backend_name(), url.host, url.port, url.database


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

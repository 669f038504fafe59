"""The environment of a test whose application is asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from cyclone_sqla.actions import Action
from cyclone_sqla.app import Cyclone
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.figures import JobEvent
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.models import Job
from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.testing.env import LIMIT, CrashPoint, CycloneEnv

P = ParamSpec("P")
T = TypeVar("T")


class AsyncCycloneEnv:
    """A :class:`CycloneEnv` on an asynchronous connection, in the test's own event loop.

    ::

        async with engine.connect() as connection, connection.begin() as outer:
            async with AsyncCycloneEnv(connection, cyclone) as env:
                ...
            await outer.rollback()

    Everything is as there, but for what has to be awaited: whatever runs or reads jobs. Async
    actions run in the test's loop and have ``ctx.async_session``; sync ones run there too, and have
    ``ctx.session``.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        app: Cyclone,
        *,
        auto_start: bool = True,
        raise_errors: bool = True,
    ) -> None:
        self.connection = connection
        self.app = app
        self._env = _InLoop(connection, app, auto_start=auto_start, raise_errors=raise_errors)

    @property
    def auto_start(self) -> bool:
        """Whether the jobs that are due run whenever a session on the connection commits."""
        return self._env.auto_start

    @auto_start.setter
    def auto_start(self, value: bool) -> None:
        self._env.auto_start = value

    @property
    def raise_errors(self) -> bool:
        """Whether what an action raised comes out where its job was run."""
        return self._env.raise_errors

    @raise_errors.setter
    def raise_errors(self, value: bool) -> None:
        self._env.raise_errors = value

    # ---- running ---------------------------------------------------------------------------------

    async def run_until_idle(self, limit: int = LIMIT) -> int:
        """See :meth:`CycloneEnv.run_until_idle`."""
        return await self._call(CycloneEnv.run_until_idle, limit)

    async def run(self, job: JobRef | Job) -> Job:
        """See :meth:`CycloneEnv.run`."""
        return await self._call(CycloneEnv.run, job)

    def crash(self, at: CrashPoint, job: JobRef | Job | None = None) -> None:
        """See :meth:`CycloneEnv.crash`."""
        self._env.crash(at, job)

    # ---- time ------------------------------------------------------------------------------------

    @property
    def clock(self) -> ManualClock:
        """What the application goes by while the environment is entered."""
        return self._env.clock

    @property
    def now(self) -> datetime:
        """The present time of this test."""
        return self._env.now

    async def advance(self, by: timedelta | None = None, /, **parts: float) -> None:
        """See :meth:`CycloneEnv.advance`."""
        await self._call(CycloneEnv.advance, by, **parts)

    def freeze(self, at: datetime | None = None) -> None:
        """See :meth:`CycloneEnv.freeze`."""
        self._env.freeze(at)

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def session(self) -> AsyncSession:
        """A session on the connection, for the test's own use; its commits are savepoints.

        What it has loaded stays as it is, also when a job changes it: ``await
        env.session.refresh(order)``.
        """
        return self._env.async_session

    async def enqueued(self, action: Action[..., Any] | str, /, **arguments: Any) -> list[Job]:
        """See :meth:`CycloneEnv.enqueued`."""
        return await self._call(CycloneEnv.enqueued, action, **arguments)

    async def jobs(self, action: Action[..., Any] | str, /, **arguments: Any) -> list[Job]:
        """See :meth:`CycloneEnv.jobs`."""
        return await self._call(CycloneEnv.jobs, action, **arguments)

    async def history(self, job: JobRef | Job) -> list[JobEvent]:
        """See :meth:`CycloneEnv.history`."""
        return await self._call(CycloneEnv.history, job)

    async def assert_enqueued(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """See :meth:`CycloneEnv.assert_enqueued`."""
        return await self._call(CycloneEnv.assert_enqueued, action, **arguments)

    async def assert_completed(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """See :meth:`CycloneEnv.assert_completed`."""
        return await self._call(CycloneEnv.assert_completed, action, **arguments)

    async def assert_discarded(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """See :meth:`CycloneEnv.assert_discarded`."""
        return await self._call(CycloneEnv.assert_discarded, action, **arguments)

    # ---- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._call(CycloneEnv.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._call(CycloneEnv.__exit__)

    async def _call(
        self, method: Callable[Concatenate[CycloneEnv, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def call(_connection: Connection) -> T:
            return method(self._env, *args, **kwargs)

        return await self.connection.run_sync(call)


class _InLoop(CycloneEnv):
    """The environment itself: it runs in a greenlet, which awaits in the test's loop."""

    def __init__(
        self, connection: AsyncConnection, app: Cyclone, *, auto_start: bool, raise_errors: bool
    ) -> None:
        if connection.sync_connection is None:
            raise ConfigurationError(
                "AsyncCycloneEnv needs a connection whose transaction is open: "
                "await connection.begin()"
            )
        super().__init__(
            connection.sync_connection, app, auto_start=auto_start, raise_errors=raise_errors
        )
        self._async_connection = connection
        self._async_session: AsyncSession | None = None

    @property
    def async_session(self) -> AsyncSession:
        """The test's own session."""
        if self._async_session is None:
            self._async_session = self._join_async()
            self._session = self._async_session.sync_session
        return self._async_session

    @property
    def session(self) -> Session:
        """The same, as what runs in the greenlet sees it."""
        return self.async_session.sync_session

    def _await(self, value: Any) -> Any:
        return await_only(value)

    def _join_async(self) -> AsyncSession:
        return AsyncSession(
            bind=self._async_connection,
            join_transaction_mode="create_savepoint",
            expire_on_commit=False,
        )

    def _expire(self) -> None:
        """What is expired could be loaded again by an await alone."""

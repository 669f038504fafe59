"""For the tests of applications: their jobs run inside the test's own, rolled-back transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.testing.env import CycloneEnv, NotIdleError

if TYPE_CHECKING:
    from cyclone_sqla.testing.async_env import AsyncCycloneEnv
    from cyclone_sqla.testing.postgresql.server import TemporaryPostgres

__all__ = ["AsyncCycloneEnv", "CycloneEnv", "ManualClock", "NotIdleError", "TemporaryPostgres"]


def __getattr__(name: str) -> Any:
    """SQLAlchemy's asyncio part, and what only a POSIX system has, is loaded by whoever asks."""
    if name == "AsyncCycloneEnv":
        from cyclone_sqla.testing.async_env import AsyncCycloneEnv

        return AsyncCycloneEnv
    if name == "TemporaryPostgres":
        from cyclone_sqla.testing.postgresql.server import TemporaryPostgres

        return TemporaryPostgres
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""For the tests of applications: their jobs run inside the test's own, rolled-back transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.testing.env import CycloneEnv, NotIdleError

if TYPE_CHECKING:
    from cyclone_sqla.testing.async_env import AsyncCycloneEnv

__all__ = ["AsyncCycloneEnv", "CycloneEnv", "ManualClock", "NotIdleError"]


def __getattr__(name: str) -> Any:
    """SQLAlchemy's asyncio part, which not everybody has, is loaded by whoever asks for it."""
    if name == "AsyncCycloneEnv":
        from cyclone_sqla.testing.async_env import AsyncCycloneEnv

        return AsyncCycloneEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

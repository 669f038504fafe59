"""For the tests of applications: their jobs run inside the test's own, rolled-back transaction."""

from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.testing.env import CycloneEnv, NotIdleError

__all__ = ["CycloneEnv", "ManualClock", "NotIdleError"]

"""The contract that the package ships for everybody, on every database of these tests."""

from cyclone_sqla.testing.conformance.conftest import contract_place, trial  # noqa: F401
from cyclone_sqla.testing.conformance.test_failure_modes import *  # noqa: F403
from cyclone_sqla.testing.conformance.test_jobs import *  # noqa: F403
from cyclone_sqla.testing.conformance.test_sequences import *  # noqa: F403
from cyclone_sqla.testing.conformance.test_unique import *  # noqa: F403
from tests.databases import on_both

pytestmark = on_both

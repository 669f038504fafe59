"""Where the cases run, and the table of what holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cyclone_sqla.testing.conformance.table import CASE
from cyclone_sqla.testing.conformance.trial import Trial, trial_on


@pytest.fixture(scope="session")
def contract_place(cyclone_database_url: str) -> Iterator[Trial]:
    """What all cases share."""
    with trial_on(cyclone_database_url) as trial:
        yield trial


@pytest.fixture
def trial(contract_place: Trial) -> Trial:
    """A queue without any job."""
    contract_place.begin_afresh()
    return contract_place


@pytest.fixture(autouse=True)
def _case(request: pytest.FixtureRequest, contract_place: Trial) -> None:
    """Marks the test's report for the table."""
    request.node.user_properties.append((CASE, contract_place.told))

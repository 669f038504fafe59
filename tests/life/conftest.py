"""Direct hands on a queue."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.databases import Database
from tests.life.hands import Hands


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    """A queue on a fresh database, once of each kind, and a clock that is moved by hand."""
    with closing(Hands(database)) as direct:
        yield direct

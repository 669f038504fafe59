"""The fixture for a test with a real worker."""

import threading

import pytest
import sqlalchemy as sa

from cyclone_sqla import Cyclone, Worker

pytestmark = pytest.mark.sqlite

cyclone = Cyclone()
done = threading.Event()


@cyclone.action
def finish() -> None:
    done.set()


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


def test_a_real_worker_has_a_file(cyclone_file_engine: sa.Engine) -> None:
    with cyclone_file_engine.begin() as connection:
        finish.enqueue(connection)
    with Worker(cyclone, database=cyclone_file_engine):
        assert done.wait(30)

"""The fixtures of the pytest plugin, used here as an application would."""

import threading

import pytest
import sqlalchemy as sa

from cyclone_sqla import Cyclone, Worker
from cyclone_sqla.testing import CycloneEnv

pytestmark = pytest.mark.sqlite

cyclone = Cyclone()
done = threading.Event()


@cyclone.action
def finish() -> None:
    done.set()


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.mark.cyclone(auto_start=False, raise_errors=False)
def test_the_marker_gives_the_environment_its_options(cyclone_env: CycloneEnv) -> None:
    assert (cyclone_env.auto_start, cyclone_env.raise_errors) == (False, False)


def test_the_default_is_sqlite_in_memory_without_threads(cyclone_env: CycloneEnv) -> None:
    assert cyclone_env.connection.engine.url.database is None
    assert (cyclone_env.auto_start, cyclone_env.raise_errors) == (True, True)


def test_a_real_worker_has_a_file(cyclone_file_engine: sa.Engine) -> None:
    with cyclone_file_engine.begin() as connection:
        finish.enqueue(connection)
    with Worker(cyclone, database=cyclone_file_engine):
        assert done.wait(30)

"""What pytest loads: a migrated database for the session, and an environment for each test.

An application says in its conftest.py what it is, and on which engine its tests run::

    @pytest.fixture(scope="session")
    def cyclone_app():
        return shop.cyclone

    @pytest.fixture(scope="session")
    def cyclone_engine():
        return create_engine("postgresql+psycopg://localhost/shop_test")

``@pytest.mark.cyclone(auto_start=False, raise_errors=False)`` gives the options of one test's
:class:`~cyclone_sqla.testing.CycloneEnv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from cyclone_sqla import Cyclone
    from cyclone_sqla.testing import CycloneEnv

# Nothing of ours or SQLAlchemy's is imported here: every run of pytest loads this module.


def pytest_addoption(parser: pytest.Parser) -> None:
    """The database of the tests, by its URL."""
    parser.addoption(
        "--cyclone-database-url",
        metavar="URL",
        help="where cyclone_engine leads, unless the application has a fixture of that name "
        "(default: SQLite in memory)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker that gives a test's environment its options."""
    config.addinivalue_line(
        "markers",
        "cyclone(auto_start=True, raise_errors=True): options of the test's cyclone_env",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the cases of the conformance suite came to, if they were run."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    if any("testing/conformance/" in report.fspath for report in reports):
        from cyclone_sqla.testing.conformance.table import write_table

        write_table(terminalreporter)


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    """The application's Cyclone: every application has to say which."""
    raise pytest.UsageError(
        "say which application is tested: a session-scoped fixture cyclone_app in conftest.py that "
        "returns its Cyclone"
    )


@pytest.fixture(scope="session")
def cyclone_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of all tests: of ``--cyclone-database-url``, else SQLite in memory."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import StaticPool

    from cyclone_sqla import begin_before_savepoints

    url: str | None = request.config.getoption("--cyclone-database-url")
    if url is None:
        in_memory = {"check_same_thread": False}
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args=in_memory)
    else:
        engine = create_engine(url)
    begin_before_savepoints(engine)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def cyclone_database(cyclone_engine: Engine, cyclone_app: Cyclone) -> Engine:
    """The engine of a database with the queue's tables in it; the application adds its own."""
    from cyclone_sqla.migrations import upgrade

    with cyclone_engine.begin() as connection:
        upgrade(connection, schema=cyclone_app.schema)
    return cyclone_engine


@pytest.fixture
def cyclone_env(
    request: pytest.FixtureRequest, cyclone_database: Engine, cyclone_app: Cyclone
) -> Iterator[CycloneEnv]:
    """The jobs of one test, on a connection whose transaction is rolled back after it."""
    from cyclone_sqla.testing import CycloneEnv

    marker: pytest.Mark | None = request.node.get_closest_marker("cyclone")
    options: Mapping[str, bool] = marker.kwargs if marker is not None else {}
    with cyclone_database.connect() as connection:
        outer = connection.begin()
        try:
            with CycloneEnv(connection, cyclone_app, **options) as env:
                yield env
        finally:
            outer.rollback()

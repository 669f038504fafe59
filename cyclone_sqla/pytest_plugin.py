"""What pytest loads: a migrated database for the session, and an environment for each test.

An application says in its conftest.py what it is, and adds its tables::

    @pytest.fixture(scope="session")
    def cyclone_app():
        return shop.cyclone

    @pytest.fixture(scope="session", autouse=True)
    def tables(cyclone_database):
        shop.Base.metadata.create_all(cyclone_database)

Where its tests run is said by ``--cyclone-database-url``, or by its own ``cyclone_engine``.
``@pytest.mark.cyclone(auto_start=False, raise_errors=False)`` gives the options of one test's
:class:`~cyclone_sqla.testing.CycloneEnv`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from cyclone_sqla import Cyclone
    from cyclone_sqla.testing import AsyncCycloneEnv, CycloneEnv

# The kit is imported where it is used: every run of pytest loads this module.


def pytest_addoption(parser: pytest.Parser) -> None:
    """The database of the tests."""
    parser.addoption(
        "--cyclone-database-url",
        metavar="URL",
        default="sqlite://",
        help="the database that cyclone_engine and cyclone_async_engine lead to, unless the "
        "application has fixtures of these names; the word postgresql alone starts a private "
        "server for the tests (default: SQLite in memory)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker that gives a test's environment its options."""
    config.addinivalue_line(
        "markers",
        "cyclone(auto_start=True, raise_errors=True): options of the test's cyclone_env",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the cases of the conformance suite came to, if they were run."""
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
def cyclone_database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the tests' database: of ``--cyclone-database-url``, or of a PostgreSQL server that
    is started for these tests and gone after them.
    """
    url = str(request.config.getoption("--cyclone-database-url"))
    if url != "postgresql":
        yield url
        return
    from cyclone_sqla.testing import TemporaryPostgres

    with TemporaryPostgres() as server:
        yield server.database_url


@pytest.fixture(scope="session")
def cyclone_engine(cyclone_database_url: str) -> Iterator[Engine]:
    """The engine of all tests, on ``cyclone_database_url``."""
    from sqlalchemy import create_engine

    from cyclone_sqla import begin_before_savepoints
    from cyclone_sqla.urls import parsed, worker_url

    url = worker_url(parsed(cyclone_database_url))
    engine = create_engine(url, **_pool_of(url.database, url.get_backend_name()))
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

    with cyclone_database.connect() as connection:
        outer = connection.begin()
        try:
            with CycloneEnv(connection, cyclone_app, **_options(request)) as env:
                yield env
        finally:
            outer.rollback()


@pytest.fixture
def cyclone_file_engine(cyclone_app: Cyclone, tmp_path: Path) -> Iterator[Engine]:
    """The engine of a fresh SQLite file with the queue's tables: for one test with threads or a
    real worker, where commits are commits.
    """
    from sqlalchemy import create_engine

    from cyclone_sqla import begin_before_savepoints
    from cyclone_sqla.migrations import migrate_database

    engine = create_engine(f"sqlite:///{tmp_path / 'cyclone.db'}")
    begin_before_savepoints(engine)
    migrate_database(engine, schema=cyclone_app.schema)
    yield engine
    engine.dispose()


# ---- asynchronous applications -------------------------------------------------------------------


@pytest.fixture(scope="session")
def cyclone_async_engine(cyclone_database_url: str) -> Iterator[AsyncEngine]:
    """The asynchronous engine of all tests, on ``cyclone_database_url``: by psycopg or aiosqlite
    unless that names another driver.

    It keeps no connections: those of one test belong to its event loop.
    """
    import asyncio

    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    from cyclone_sqla import begin_before_savepoints
    from cyclone_sqla.urls import parsed

    url = parsed(cyclone_database_url)
    if url.drivername == "sqlite":
        url = url.set(drivername="sqlite+aiosqlite")
    elif url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    pool = _pool_of(url.database, url.get_backend_name()) or {"poolclass": NullPool}
    engine = create_async_engine(url, **pool)
    begin_before_savepoints(engine)
    yield engine
    asyncio.run(engine.dispose())


@pytest.fixture(scope="session")
def cyclone_async_database(cyclone_async_engine: AsyncEngine, cyclone_app: Cyclone) -> AsyncEngine:
    """The asynchronous engine of a database with the queue's tables in it."""
    import asyncio

    from cyclone_sqla.migrations import upgrade

    async def migrate() -> None:
        async with cyclone_async_engine.begin() as connection:
            await connection.run_sync(lambda sync: upgrade(sync, schema=cyclone_app.schema))

    asyncio.run(migrate())
    return cyclone_async_engine


@pytest.fixture
def cyclone_async_env(request: pytest.FixtureRequest) -> AsyncCycloneEnv:
    """The jobs of one asynchronous test: by anyio's plugin where the test uses that, else by
    pytest-asyncio.
    """
    env: AsyncCycloneEnv = request.getfixturevalue(_runner_of(request))
    return env


def _runner_of(request: pytest.FixtureRequest) -> str:
    """The fixture below that has its environment in the event loop of the test itself."""
    if "anyio_backend" in request.fixturenames:
        return "_cyclone_env_of_anyio"
    if not request.config.pluginmanager.has_plugin("asyncio"):
        raise pytest.UsageError(
            "cyclone_async_env needs a plugin that runs asynchronous tests: anyio's (and "
            "pytest.mark.anyio on the test), or pytest-asyncio"
        )
    return f"_cyclone_env_of_asyncio_{_loop_scope(request)}"


def _loop_scope(request: pytest.FixtureRequest) -> str:
    """Of the event loop in which pytest-asyncio runs the test: "function" unless said otherwise."""
    marked = _marked(request, "asyncio")
    try:
        default = str(request.config.getini("asyncio_default_test_loop_scope"))
    except ValueError:  # before 0.26 there was no such option
        default = "function"
    scope: str = marked.get("loop_scope") or marked.get("scope") or default
    return scope


def _env_fixture(declare: Callable[..., Any]) -> Any:
    """A fixture of a plugin that runs asynchronous tests."""

    async def env(
        request: pytest.FixtureRequest, cyclone_async_database: AsyncEngine, cyclone_app: Cyclone
    ) -> AsyncIterator[AsyncCycloneEnv]:
        async with _async_env(cyclone_async_database, cyclone_app, _options(request)) as env:
            yield env

    return declare(env)


of_anyio = _env_fixture(pytest.fixture(name="_cyclone_env_of_anyio"))

if find_spec("pytest_asyncio") is not None:
    _declare: Any = import_module("pytest_asyncio").fixture
    of_function, of_class, of_module, of_package, of_session = (
        _env_fixture(_declare(name=f"_cyclone_env_of_asyncio_{scope}", loop_scope=scope))
        for scope in ("function", "class", "module", "package", "session")
    )


@asynccontextmanager
async def _async_env(
    engine: AsyncEngine, app: Cyclone, options: Mapping[str, bool]
) -> AsyncGenerator[AsyncCycloneEnv]:
    from cyclone_sqla.testing import AsyncCycloneEnv

    async with engine.connect() as connection:
        outer = await connection.begin()
        try:
            async with AsyncCycloneEnv(connection, app, **options) as env:
                yield env
        finally:
            await outer.rollback()


# ---- what they share -----------------------------------------------------------------------------


def _pool_of(database: str | None, backend: str) -> dict[str, Any]:
    """A database in memory is one connection, whoever asks for it."""
    from sqlalchemy.pool import StaticPool

    if backend != "sqlite" or database not in (None, "", ":memory:"):
        return {}
    return {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}


def _options(request: pytest.FixtureRequest) -> Mapping[str, bool]:
    return _marked(request, "cyclone")


def _marked(request: pytest.FixtureRequest, name: str) -> Mapping[str, Any]:
    """What the mark of this name says of the test."""
    marker: pytest.Mark | None = request.node.get_closest_marker(name)
    return marker.kwargs if marker is not None else {}

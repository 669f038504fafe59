"""The examples are tested as their readers would: with the fixtures of the pytest plugin.

Every module says which application it tests, by a `cyclone_app`, and makes its tables.
"""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import StaticPool

from cyclone_sqla import begin_before_savepoints
from tests.databases import postgresql_copy


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("postgresql", marks=pytest.mark.postgresql),
    ],
)
def cyclone_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """SQLite in memory, and PostgreSQL."""
    if request.param == "sqlite":
        in_memory = {"check_same_thread": False}
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args=in_memory)
        begin_before_savepoints(engine)
        yield engine
        engine.dispose()
        return
    server, template = map(request.getfixturevalue, ("postgres", "postgres_template"))
    with postgresql_copy(server, template) as database:
        yield database.engine()

"""The examples are tested as their readers would: with the fixtures of the pytest plugin.

Every module says which application it tests, by a `cyclone_app`, and makes its tables. They run on
SQLite in memory; `on_both` runs the tests of a module on PostgreSQL too.
"""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import StaticPool

from cyclone_sqla import begin_before_savepoints
from tests.databases import postgresql_copy


@pytest.fixture(scope="session")
def cyclone_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of the tests: SQLite in memory unless the test says "postgresql"."""
    if getattr(request, "param", "sqlite") == "postgresql":
        server, template = map(request.getfixturevalue, ("postgres", "postgres_template"))
        with postgresql_copy(server, template) as database:
            yield database.engine()
        return
    in_memory = {"check_same_thread": False}
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args=in_memory)
    begin_before_savepoints(engine)
    yield engine
    engine.dispose()

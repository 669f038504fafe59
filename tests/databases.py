"""Databases for tests: made once with our tables in them, then copied for each test."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, make_url

from cyclone_sqla.migrations import migrate_database
from tests.servers.postgres import Postgres


@dataclass
class Database:
    """A database of one test alone, with our tables in it."""

    url: str
    _engines: list[Engine] = field(default_factory=list, init=False)

    def engine(self, driver: str | None = None, **options: Any) -> Engine:
        """A new engine, with `options` of `create_engine`; it is disposed of after the test."""
        url = self.url if driver is None else self.url_for(driver)
        engine = create_engine(url, **options)
        self._engines.append(engine)
        return engine

    def url_for(self, driver: str) -> str:
        """The URL for another driver, such as "asyncpg" or "aiosqlite"."""
        url = make_url(self.url).set(drivername=f"{self.dialect}+{driver}")
        return url.render_as_string(hide_password=False)

    @property
    def dialect(self) -> str:
        """ "postgresql" or "sqlite"."""
        return make_url(self.url).get_backend_name()

    def close(self) -> None:
        """Close the connections of all engines."""
        for engine in self._engines:
            engine.dispose()


@contextmanager
def postgresql_template(server: Postgres) -> Iterator[str]:
    """The name of a database with our tables, to be copied."""
    name = _new_name("template")
    server.create_database(name)
    try:
        migrate_database(server.url(name))
        server.close_database(name)
        yield name
    finally:
        server.drop_database(name)


@contextmanager
def postgresql_copy(server: Postgres, template: str) -> Iterator[Database]:
    """A database like `template`; it is dropped afterwards, whoever is still connected."""
    name = _new_name("test")
    server.create_database(name, template)
    try:
        with closing(Database(server.url(name))) as database:
            yield database
    finally:
        server.drop_database(name)


def sqlite_template(directory: Path) -> Path:
    """A file in WAL mode with our tables, to be copied."""
    path = directory / "template.db"
    migrate_database(f"sqlite:///{path}")
    return path


@contextmanager
def sqlite_copy(template: Path, directory: Path) -> Iterator[Database]:
    """A database file like `template` in `directory`."""
    path = directory / "cyclone.db"
    shutil.copyfile(template, path)  # complete: the last connection has written the WAL back
    with closing(Database(f"sqlite:///{path}")) as database:
        yield database


def _new_name(purpose: str) -> str:
    return f"cyclone_{purpose}_{uuid.uuid4().hex[:12]}"

"""Databases for tests: made once with our tables in them, then copied for each test."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url

from cyclone_sqla.migrations import migrate_database
from tests.servers.postgres import Postgres

on_both = pytest.mark.parametrize(
    "cyclone_database_url",
    [
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("sqlite", marks=pytest.mark.sqlite),
    ],
    indirect=True,
    scope="session",
)
"""Where the tests of a module run that take the fixtures of the pytest plugin."""


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


class PostgresCopies:
    """Databases like a template, lent to one test after the other: to copy one takes longer than
    most tests do.

    What a test has left is removed: its connections, its tables, our rows. One whose catalog then
    differs from the template's in anything else, or that the server has gathered statistics about,
    is dropped instead.
    """

    def __init__(self, server: Postgres, template: str) -> None:
        self._server = server
        self._template = template
        self._shape: list[str] = []
        self._free: list[str] = []

    @contextmanager
    def lend(self) -> Iterator[Database]:
        """A database that is as fresh as a copy."""
        name = self._free.pop() if self._free else self._copy()
        try:
            with closing(Database(self._server.url(name))) as database:
                yield database
        finally:
            self._take_back(name)

    def _copy(self) -> str:
        name = _new_name("test")
        self._server.create_database(name, self._template)
        if not self._shape:
            with self._connect(name) as connection:
                self._shape = _shape(connection)
        return name

    def _take_back(self, name: str) -> None:
        if self._clean(name):
            self._free.append(name)
        else:
            self._server.drop_database(name)

    def _clean(self, name: str) -> bool:
        try:
            with self._connect(name) as connection:
                connection.execute("SET lock_timeout = '1s'")
                connection.execute(_END_OTHERS)
                connection.execute(_DROP_OTHERS)
                if _shape(connection) != self._shape:
                    return False
                connection.execute(_EMPTY_OURS)
        except psycopg.Error:
            return False
        return True

    def _connect(self, name: str) -> psycopg.Connection[tuple[Any, ...]]:
        url = make_url(self._server.url(name)).set(drivername="postgresql")
        return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)


_END_OTHERS = """
SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

_DROP_OTHERS = r"""
DO $$ DECLARE stranger text; BEGIN
    FOR stranger IN SELECT oid::regclass FROM pg_class
        WHERE relkind IN ('r', 'v') AND relnamespace = 'public'::regnamespace
        AND relname NOT LIKE 'cyclone\_%'
    LOOP EXECUTE 'DROP ' || (SELECT CASE relkind WHEN 'v' THEN 'VIEW ' ELSE 'TABLE ' END
        FROM pg_class WHERE oid = stranger::regclass) || stranger || ' CASCADE'; END LOOP;
END $$
"""

_EMPTY_OURS = r"""
DO $$ DECLARE ours text; BEGIN
    SELECT string_agg(oid::regclass::text, ', ') INTO ours FROM pg_class WHERE relkind = 'r'
        AND relname LIKE 'cyclone\_%' AND relname <> 'cyclone_alembic_version';
    EXECUTE 'TRUNCATE ' || ours || ' RESTART IDENTITY';
    ALTER SEQUENCE cyclone_lease_seq RESTART;
END $$
"""

_SHAPE = """
WITH ours AS (
    SELECT * FROM pg_class WHERE relnamespace::regnamespace::text !~ '^(pg_|information_)'
)
SELECT concat(relname, relkind, relowner, relreplident, reloptions, relacl, relrowsecurity)
    FROM ours
UNION ALL SELECT concat(tgname, tgenabled) FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM ours)
UNION ALL SELECT concat(attrelid::regclass, attname, atttypid, attnotnull, attstattarget)
    FROM pg_attribute WHERE attrelid IN (SELECT oid FROM ours) AND attnum > 0
UNION ALL SELECT concat(conname, pg_get_constraintdef(oid)) FROM pg_constraint
    WHERE conrelid IN (SELECT oid FROM ours)
UNION ALL SELECT proname FROM pg_proc
    WHERE pronamespace::regnamespace::text !~ '^(pg_|information_)'
UNION ALL SELECT concat(nspname, nspacl) FROM pg_namespace WHERE nspname !~ '^pg_'
UNION ALL SELECT setconfig::text FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase
    WHERE datname = current_database()
UNION ALL SELECT extname FROM pg_extension
UNION ALL SELECT 'statistics' FROM pg_statistic WHERE starelid IN (SELECT oid FROM ours)
UNION ALL SELECT version_num FROM cyclone_alembic_version
"""


def _shape(connection: psycopg.Connection[tuple[Any, ...]]) -> list[str]:
    """All that the catalog says of what is not the server's own."""
    return sorted(row[0] for row in connection.execute(_SHAPE))


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

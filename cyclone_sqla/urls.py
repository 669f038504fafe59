"""Database URLs: read from text, shown without secrets, turned into those of our own engines."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import ArgumentError

from cyclone_sqla.errors import ConfigurationError

_SYNCHRONOUS = {"sqlite+aiosqlite": "sqlite+pysqlite", "postgres": "postgresql+psycopg"}

_SECRETS = ("password", "sslpassword")
"""Query parameters that are as secret as the password before the ``@``."""

_OF_ASYNCPG = (
    "command_timeout",
    "direct_tls",
    "max_cacheable_statement_size",
    "max_cached_statement_lifetime",
    "prepared_statement_cache_size",
    "prepared_statement_name_func",
    "ssl_negotiation",
    "statement_cache_size",
)
"""Query parameters that only asyncpg knows; libpq would refuse the whole URL for one of them."""


def parsed(text: str) -> sa.URL:
    """The URL that ``text`` spells.

    Raises:
        ConfigurationError: it spells none; the message never repeats the text.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        url = None
    if url is None or (url.password is not None and text.partition("?")[0].count("@") > 1):
        # Not chained: some releases of SQLAlchemy quote the text, password and all.
        raise ConfigurationError(
            "this is not a database URL, such as postgresql://user:password@host/database or "
            "sqlite:///file.db (in a password, write @ as %40, : as %3A, / as %2F and % as %25)"
        )
    return url


def url_of(database: Engine | sa.URL) -> sa.URL:
    """Where a database is, given as its URL or as an engine."""
    return database if isinstance(database, sa.URL) else database.url


def masked(url: sa.URL) -> str:
    """The URL as text that may be shown: passwords are ``***``, wherever they stand."""
    hidden = {name: "***" for name in _SECRETS if name in url.query}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def worker_url(url: sa.URL) -> sa.URL:
    """The same database through a driver of ours: psycopg for PostgreSQL, sqlite3 for SQLite.

    An application may use ``+asyncpg``, ``+psycopg2`` or ``+aiosqlite``; the worker and the
    migrations are synchronous.
    """
    if url.drivername in _SYNCHRONOUS:
        return url.set(drivername=_SYNCHRONOUS[url.drivername])
    if url.get_backend_name() != "postgresql":
        return url
    if url.drivername == "postgresql+asyncpg":
        url = _without_asyncpg_words(url)
    return url.set(drivername="postgresql+psycopg")


def _without_asyncpg_words(url: sa.URL) -> sa.URL:
    renamed = {"ssl": "sslmode", "timeout": "connect_timeout"}
    query = {renamed.get(name, name): value for name, value in url.query.items()}
    return url.set(query={name: value for name, value in query.items() if name not in _OF_ASYNCPG})

"""The way of a person's command to the queue: on a connection of its own."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import click
from sqlalchemy import Connection, Engine

from cyclone_sqla import schema_version
from cyclone_sqla.app import Cyclone
from cyclone_sqla.cli.failures import database_failures
from cyclone_sqla.cli.options import Target
from cyclone_sqla.dialects.migrating import migrating
from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.settings import DEFAULT_SETTINGS

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Access:
    """A queue that a command works on."""

    cyclone: Cyclone
    engine: Engine

    def transaction(self) -> AbstractContextManager[Connection]:
        """A transaction, committed at the end."""
        return self.engine.begin()


@contextmanager
def access_to(target: Target) -> Generator[Access]:
    """Connect to the target's queue.

    Raises SchemaError if its tables are missing or of another version; creates no SQLite file.
    """
    with database_failures(target.url):
        _require_tables(target)
        with connected(target) as access:
            yield access


@contextmanager
def connected(target: Target) -> Generator[Access]:
    """The same, for one who has seen that the tables fit."""
    cyclone = target.app or Cyclone(schema=target.schema, hints="transaction")
    if cyclone.schema != target.schema:
        cyclone.use_schema(target.schema)
    engine = cyclone.dialect(target.url.get_backend_name()).command_engine(target.database)
    try:
        yield Access(cyclone, engine)
    finally:
        engine.dispose()


def reading(target: Target) -> AbstractContextManager[Connection]:
    """A connection for a look at the tables' version; creates no SQLite file."""
    patience = timedelta(seconds=DEFAULT_SETTINGS.lock_timeout)
    return migrating(target.url.get_backend_name(), patience).reading(target.database)


def _require_tables(target: Target) -> None:
    with reading(target) as connection:
        found = schema_version.installed(connection, target.schema)
    if found is None or found.revision not in schema_version.SUPPORTED:
        raise SchemaError(schema_version.complaint(found, target.url, target.schema))


def require_app(target: Target, what_for: str) -> None:
    """Raise ConfigurationError if no application is named."""
    if target.app is None:
        raise ConfigurationError(
            f"{what_for}: give --app module:attribute, like --app shop.jobs:cyclone, or "
            "[tool.cyclone-sqla] app in pyproject.toml"
        )


def acts(command: Command) -> Command:
    """Give a command `--by`: who acts."""
    option = click.option(
        "--by",
        default=os_user,
        metavar="NAME",
        help="Who acts, for the history.  [default: you, by the name of this system]",
    )
    return option(command)


def os_user() -> str:
    """The name of the system's user, or its number where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"

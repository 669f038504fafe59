"""The options that name a database and an application, the same for every command."""

from __future__ import annotations

import sys
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
import sqlalchemy as sa
from sqlalchemy import Engine

from cyclone_sqla.app import Cyclone
from cyclone_sqla.cli.texts import shown
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.schema_version import check_schema
from cyclone_sqla.urls import masked, parsed

P = ParamSpec("P")
Command = TypeVar("Command", bound=Callable[..., Any])

DATABASE_URL = "CYCLONE_DATABASE_URL"

DEFAULT_URL = "sqlite:///cyclone.db"


@dataclass(frozen=True)
class Target:
    """What a command works on: a database, a schema (None: the default one), an application."""

    database: Engine | sa.URL
    schema: str | None
    app: Cyclone | None

    @property
    def url(self) -> sa.URL:
        """The database's URL, passwords included: show it with ``masked``."""
        return self.database if isinstance(self.database, sa.URL) else self.database.url

    def __str__(self) -> str:
        return masked(self.url) + (f" (schema {self.schema})" if self.schema else "")


def target_options(command: Command) -> Command:
    """Give a command `--database-url`, `--schema` and `--app`, for ``find_target``."""
    for option in reversed(_TARGET_OPTIONS):
        command = option(command)
    return command


_TARGET_OPTIONS = (
    click.option(
        "--database-url",
        envvar=DATABASE_URL,
        show_envvar=True,
        metavar="URL",
        help=f"The database. Without it: the one of the application, or {DEFAULT_URL}.",
    ),
    click.option("--schema", metavar="NAME", help="The schema of the queue's tables."),
    click.option(
        "--app",
        metavar="MODULE:ATTRIBUTE",
        help="The application's Cyclone. Default: `app` of [tool.cyclone-sqla] in pyproject.toml.",
    ),
)


def takes_target(command: Callable[Concatenate[Target, P], None]) -> Callable[..., None]:
    """Give a command the options of a Target, which it takes as its first argument."""

    @target_options
    @wraps(command)
    def with_target(
        database_url: str | None,
        schema: str | None,
        app: str | None,
        *args: P.args,
        **options: P.kwargs,
    ) -> None:
        command(find_target(database_url, schema, app), *args, **options)

    return with_target


def say_on_stderr(text: str) -> None:
    """For people, beside what a command prints for programs."""
    click.echo(shown(text), err=True)


def find_target(
    database_url: str | None,
    schema: str | None,
    app: str | None,
    say: Callable[[str], None] = say_on_stderr,
) -> Target:
    """The database, schema and application that the options, and what stands in for them, name.

    ``say`` is told if nothing names a database, so that it is the default one.

    Raises:
        ConfigurationError: one of them can't be; in one line.
    """
    name = app or _configured_app()
    cyclone = load_app(name) if name is not None else None
    if schema is None and cyclone is not None:
        schema = cyclone.schema
    check_schema(schema)
    return Target(_database(database_url, cyclone, say), schema, cyclone)


def _database(
    database_url: str | None, cyclone: Cyclone | None, say: Callable[[str], None]
) -> Engine | sa.URL:
    if database_url is not None:
        return parsed(database_url)
    found = cyclone.resolve_database() if cyclone is not None else None
    if found is None:
        say(f"No database was named: using {DEFAULT_URL}")
        return parsed(DEFAULT_URL)
    return found


def load_app(name: str) -> Cyclone:
    """The Cyclone at ``module:attribute``; modules in the current directory are found.

    Raises:
        ConfigurationError: there is none; in one line.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(
            f"the application {name!r} must be written as module:attribute, like shop.jobs:cyclone"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found = _attribute(module, attribute)
    if not isinstance(found, Cyclone):
        raise ConfigurationError(f"{name} is a {type(found).__name__}, not a Cyclone")
    return found


def _attribute(module: str, attribute: str) -> object:
    try:
        imported = import_module(module)
    except Exception as exc:
        place = traceback.extract_tb(exc.__traceback__)[-1]
        raise ConfigurationError(
            f"can't import the application's module {module}: {type(exc).__name__}: {exc} "
            f"({place.filename}:{place.lineno})"
        ) from exc
    try:
        found: object = attrgetter(attribute)(imported)
    except AttributeError:
        raise ConfigurationError(f"the module {module} has no {attribute}") from None
    return found


def _configured_app() -> str | None:
    """`app` of [tool.cyclone-sqla] in the pyproject.toml of the current directory."""
    try:
        text = Path("pyproject.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        name = tomllib.loads(text).get("tool", {}).get("cyclone-sqla", {}).get("app")
    except tomllib.TOMLDecodeError as exc:
        raise ConfigurationError(f"pyproject.toml can't be read: {exc}") from exc
    if name is not None and not isinstance(name, str):
        raise ConfigurationError("pyproject.toml: [tool.cyclone-sqla] app must be a text")
    return name

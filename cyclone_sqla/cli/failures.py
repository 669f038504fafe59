"""How a command fails: one line on stderr, and an exit code that says whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from cyclone_sqla.errors import ConfigurationError, CycloneError, SchemaError
from cyclone_sqla.urls import masked

FAILED = 1
"""The database could not be reached, is behind, or refused."""

WRONG_USE = 2
"""An option, a setting or the application is wrong."""

INTERRUPTED = 130
"""Ctrl-C."""

EXIT_CODES = (
    f"Exit codes: 0 done; {FAILED} the database could not be reached, is behind, or refused; "
    f"{WRONG_USE} an option, a setting or the application is wrong; {INTERRUPTED} interrupted."
)


class Failure(click.ClickException):
    """A reason to end the process, shown as one line."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code  # type: ignore[misc]  # click's default is a class variable


@contextmanager
def one_line_failures() -> Iterator[None]:
    """Turn what may go wrong in a command into its one line."""
    try:
        yield
    except click.UsageError as exc:
        exc.ctx = None  # it would add two lines of usage
        raise
    except CycloneError as exc:
        wrong_use = isinstance(exc, ConfigurationError) and not isinstance(exc, SchemaError)
        raise Failure(str(exc), WRONG_USE if wrong_use else FAILED) from exc
    except KeyboardInterrupt as exc:
        raise Failure("interrupted", INTERRUPTED) from exc


@contextmanager
def database_failures(url: sa.URL) -> Iterator[None]:
    """Name the database in the errors of its driver."""
    try:
        yield
    except DBAPIError as exc:
        raise Failure(f"{masked(url)}: {exc.orig}") from exc
    except ImportError as exc:
        raise Failure(
            f"the driver of {masked(url)} can't be loaded ({exc}); for PostgreSQL: "
            "pip install 'cyclone-sqla[binary]'",
            WRONG_USE,
        ) from exc

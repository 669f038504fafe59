"""How a command fails: one line on stderr, and an exit code that says whose turn it is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError

from cyclone_sqla.cli.texts import shown
from cyclone_sqla.errors import ConfigurationError, CycloneError, InvalidJobError, SchemaError
from cyclone_sqla.urls import masked

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130

_HELP: tuple[type[Exception], ...] = (
    (click.exceptions.NoArgsIsHelpError,) if hasattr(click.exceptions, "NoArgsIsHelpError") else ()
)
"""What releases of click from 8.2 on raise where a group is called without a command."""

EXIT_CODES = (
    f"Exit codes: 0 done; {FAILED} the database could not be reached, is behind, or refused; "
    f"{WRONG_USE} an option, a setting or the application is wrong; {INTERRUPTED} interrupted."
)


class Failed(click.ClickException):
    """The database could not be reached, is behind, or refused. The message is one line."""

    exit_code = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


class WrongUse(Failed):
    """An option, a setting or the application is wrong."""

    exit_code = WRONG_USE


class Interrupted(Failed):
    """Ctrl-C."""

    exit_code = INTERRUPTED


@contextmanager
def one_line_failures() -> Generator[None]:
    """Turn what may go wrong in a command into its one line."""
    try:
        yield
    except _HELP:
        raise  # a group alone: click shows its help
    except click.UsageError as exc:
        raise WrongUse(exc.format_message()) from exc  # its own would show two lines of usage
    except SchemaError as exc:
        raise Failed(str(exc)) from exc
    except ConfigurationError as exc:
        raise WrongUse(str(exc)) from exc
    except InvalidJobError as exc:
        raise WrongUse(str(exc)) from exc
    except CycloneError as exc:
        raise Failed(str(exc)) from exc
    except KeyboardInterrupt as exc:
        raise Interrupted("interrupted") from exc


@contextmanager
def database_failures(url: sa.URL) -> Generator[None]:
    """Name the database in the errors of its driver, and in those that keep it from loading."""
    try:
        yield
    except DBAPIError as exc:
        raise Failed(f"{masked(url)}: {exc.orig}") from exc
    except ArgumentError as exc:
        raise WrongUse(f"{masked(url)}: {exc}") from exc
    except ImportError as exc:
        raise WrongUse(
            f"the driver of {masked(url)} can't be loaded ({exc}); for PostgreSQL: "
            "pip install 'cyclone-sqla[binary]'"
        ) from exc

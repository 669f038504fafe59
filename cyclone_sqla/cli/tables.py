"""What commands print for people: tables that fit the terminal, and whole lines into a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cyclone_sqla.cli.texts import shown

PIPED = 10_000
"""The width where nobody looks: whoever reads a pipe wants whole lines."""


@dataclass(frozen=True)
class Column:
    """A column. One that ``gives`` is cut where the terminal is too narrow for all."""

    name: str
    gives: bool = False
    justify: Literal["left", "right"] = "left"


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their names, one a line; a None is an empty cell."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.name, no_wrap=not column.gives, justify=column.justify, overflow="ellipsis"
        )
    for row in rows:
        # What gives would rather wrap than be cut, if its cells let it.
        table.add_row(*(Text(shown(cell), no_wrap=True) for cell in row))
    _console().print(table)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one a line; leaves out what is None."""
    given = [(name, value) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in given), default=0)
    for name, value in given:
        print_line(f"{name:<{width}}  {shown(value)}")


def print_line(text: str) -> None:
    """Print a line as it is: a terminal wraps it."""
    _console().print(Text(text), soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, indented as they are."""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        print_line(" " * indent + shown(line))


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped at words."""
    _console().print(Text(shown(text)))


def _console() -> Console:
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED if is_piped else None, highlight=False)

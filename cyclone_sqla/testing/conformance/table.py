"""The table of what holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

CASE = "cyclone case"
"""The property of a test's report that tells on which database the case was run."""

_WORDS = {"passed": "holds", "failed": "BROKEN", "error": "ERROR", "skipped": "not run"}


def write_table(reporter: pytest.TerminalReporter) -> None:
    """Every case that was run, by page, and whether it holds; nothing if none was."""
    rows = sorted(_rows(reporter))
    if not rows:
        return
    places = sorted({where for *_, where in rows})
    reporter.section(f"the contract on {'; '.join(places)}")
    page = ""
    for module, name, word, _ in rows:
        if module != page:
            page = module
            reporter.write_line(_plain(page))
        is_fine = word.islower()
        reporter.write_line(f"  {word:<8} {_plain(name)}", red=not is_fine, green=is_fine)


def _rows(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str, str, str]]:
    for outcome, word in _WORDS.items():
        for report in reporter.getreports(outcome):
            properties: dict[str, Any] = dict(getattr(report, "user_properties", ()))
            where: str | None = properties.get(CASE)
            if where is not None:
                path, _, name = report.nodeid.partition("::")
                yield PurePath(path).stem, name, word, where


def _plain(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")

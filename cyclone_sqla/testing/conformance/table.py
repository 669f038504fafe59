"""The table of what holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

CASE = "cyclone case"
"""The property of a test's report that tells on which database the case was run."""

HOLDS = "holds"

_WORDS = {"passed": HOLDS, "skipped": "not run", "failed": "BROKEN", "error": "ERROR"}
"""By what pytest says of a test; what is said later is the worse, and counts."""


class _Case(NamedTuple):
    """Cases are ordered as one reads them."""

    page: str
    line: int
    name: str


def write_table(reporter: pytest.TerminalReporter) -> None:
    """Every case that was run, by page, and whether it holds; nothing if none was."""
    cases, places = _run(reporter)
    if not cases:
        return
    reporter.section(f"the contract on {'; '.join(sorted(places))}")
    page = ""
    for case, words in sorted(cases.items()):
        if case.page != page:
            page = case.page
            reporter.write_line(_plain(page))
        for word, which in _told(words):
            reporter.write_line(f"  {word:<8} {_plain(case.name)}{which}", **_colour(word))
    held = sum(set(words.values()) == {HOLDS} for words in cases.values())
    reporter.write_line(f"{held} of {len(cases)} hold")


def _run(reporter: pytest.TerminalReporter) -> tuple[dict[_Case, dict[str, str]], set[str]]:
    """The word on every variant of every case, and the databases."""
    cases: dict[_Case, dict[str, str]] = defaultdict(dict)
    places: set[str] = set()
    for outcome, word in _WORDS.items():
        for report in reporter.getreports(outcome):
            properties: dict[str, Any] = dict(getattr(report, "user_properties", ()))
            if CASE in properties:
                places.add(properties[CASE])
                case, variant = _case_of(report)
                cases[case][variant] = word
    return cases, places


def _case_of(report: pytest.TestReport) -> tuple[_Case, str]:
    path, _, test = report.nodeid.partition("::")
    name, _, variant = test.partition("[")
    return _Case(PurePath(path).stem, report.location[1] or 0, name), variant.removesuffix("]")


def _told(words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A line for all variants of a case, or for those that came to the same end."""
    for word in dict.fromkeys(words.values()):
        variants = [_plain(variant) for variant, own in words.items() if own == word]
        yield word, "" if len(variants) == len(words) else f" ({'; '.join(variants)})"


def _colour(word: str) -> dict[str, bool]:
    return {{HOLDS: "green", "not run": "yellow"}.get(word, "red"): True}


def _plain(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ").strip()

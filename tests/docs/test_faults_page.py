"""The page of faults names tests that exist, and every fault of the soak run."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.soak import faults

CHECKOUT = Path(__file__).parents[2]

PAGE = (CHECKOUT / "docs" / "explanation" / "faults.md").read_text()

ROWS = PAGE.partition("## Fault by fault")[2].partition("##")[0]

NAMED = sorted(set(re.findall(r"`(test_\w+)`", PAGE)))

AT_RANDOM = sorted({*faults.OF_WORKERS, *faults.OF_POSTGRESQL, *faults.OF_SQLITE})


@cache
def defined() -> set[str]:
    found: set[str] = set()
    for path in (CHECKOUT / "tests").rglob("test_*.py"):
        found.update(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return found


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_it_names_exists(name: str) -> None:
    assert name in defined()


@pytest.mark.parametrize("name", AT_RANDOM)
def test_every_fault_of_the_soak_run_has_its_place(name: str) -> None:
    assert f"`{name}`" in ROWS


def test_no_fault_is_without_an_answer() -> None:
    rows = [line.split("|")[1:-1] for line in ROWS.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    for fault, busy, *_ in rows[2:]:
        assert re.search(r"soak|test_\w+", busy), fault

"""The pages of figures say what was measured: their tables are made from the kept figures."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.page import BEGIN, END, FIGURES, PAGES, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_made_from_the_figures(page: Path) -> None:
    text = page.read_text()
    made = PAGES[page](json.loads(FIGURES.read_text()))
    assert made.count("\n| ") > 2
    assert with_tables(text, made) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_a_table_of_figures_beside_them(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    assert "--:" not in before + after

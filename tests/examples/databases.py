"""Where the tests of an example run."""

import pytest

on_both = pytest.mark.parametrize(
    "cyclone_engine",
    [
        pytest.param("sqlite", marks=pytest.mark.sqlite),
        pytest.param("postgresql", marks=pytest.mark.postgresql),
    ],
    indirect=True,
    scope="session",
)

"""The promises of the typed surface, put to mypy and pyright as users would run them."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[2]
_FOLDER = "tests/typing"
_REFUSED = _CHECKOUT / _FOLDER / "refused.py"


def _check(*command: str) -> str:
    """What a checker prints about the folder if it is not content; else nothing."""
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", *command, _FOLDER],
        cwd=_CHECKOUT,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mypy_accepts_what_is_right_and_reports_what_is_wrong() -> None:
    assert _check("mypy") == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pyright_accepts_what_is_right_and_reports_what_is_wrong() -> None:
    assert _check("pyright", "--pythonpath", sys.executable) == ""


def test_an_error_that_a_checker_no_longer_reports_is_itself_an_error() -> None:
    tool = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["tool"]
    assert tool["mypy"]["strict"]
    assert tool["pyright"]["reportUnnecessaryTypeIgnoreComment"] == "error"
    assert _FOLDER in tool["mypy"]["files"]
    assert _FOLDER in tool["pyright"]["include"]


def test_every_refused_call_is_an_error_in_both() -> None:
    calls = [line for line in _REFUSED.read_text().splitlines() if "ignore[" in line]
    of_one = [line for line in calls if len(re.findall(r"\b(?:type|pyright): ignore\[", line)) != 2]
    assert len(calls) > 50
    # mypy gives up a whole signature that has an explicit Any in it.
    assert [line.split("#")[0].strip() for line in of_one] == ['with_any.enqueue(session, {}, "n")']


def test_every_accepted_action_is_registered_and_sound() -> None:
    from tests.typing.accepted import cyclone

    cyclone.check()
    assert len(cyclone.registry) > 10

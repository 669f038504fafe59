"""README.md: what it tells a newcomer to type works exactly as it is printed."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import PATIENCE
from tests.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]

README = (CHECKOUT / "README.md").read_text()


def _blocks(language: str, section: str) -> list[list[str]]:
    """The fenced blocks of a language in a section, without empty lines."""
    text = README.partition(f"## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [list(filter(None, block.splitlines())) for block in found]


def _commands(section: str) -> list[str]:
    """What the section has one type into a shell."""
    lines = [line for block in _blocks("console", section) for line in block]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone has, to build from and to work in."""
    copy = tmp_path_factory.mktemp("readme") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(CHECKOUT / name, copy)
    for folder in ("cyclone_sqla", "alembic"):
        shutil.copytree(CHECKOUT / folder, copy / folder)
    return copy


@pytest.fixture(scope="module")
def environment(checkout: Path) -> dict[str, str]:
    """Where `pip` installs into a directory of the test's own, what it needs is there already, and
    the programs of that directory are found first.
    """
    site, temporary = checkout.parent / "site", checkout.parent / "temporary"
    temporary.mkdir()
    path = [str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    pip = {"TARGET": str(site), "NO_INDEX": "1", "NO_DEPS": "1", "NO_BUILD_ISOLATION": "0"}
    inherited = {name: value for name, value in os.environ.items() if name[:8] != "CYCLONE_"}
    return {
        **inherited,
        **{f"PIP_{name}": value for name, value in pip.items()},
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(site),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
    }


def _run(command: str, checkout: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        shell=True,
        cwd=checkout,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def _worker(
    command: str, checkout: Path, environment: dict[str, str], output: Path
) -> Iterator[Path]:
    """A worker, which Ctrl-C stops at the end; what it writes goes to `output`."""
    with (
        output.open("w") as file,
        subprocess.Popen(
            shlex.split(command), cwd=checkout, env=environment, stdout=file, stderr=file
        ) as process,
    ):
        try:
            yield output
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0, output.read_text()
        finally:
            process.kill()


def test_the_quickstart_works_as_printed(
    checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (program,) = _blocks("python", "Quickstart")
    (checkout / "shop.py").write_text("\n".join(program))
    *commands, work = _commands("Quickstart")
    install, migrate, order = [_run(command, checkout, environment) for command in commands]
    assert "Successfully installed cyclone-sqla" in install
    assert "shop.db is at revision" in migrate
    assert order == ""
    with _worker(work, checkout, environment, tmp_path / "output") as output:
        wait_until(
            lambda: "order 7 is on its way" in output.read_text().splitlines(),
            "the job has run",
            within=PATIENCE,
        )


@pytest.mark.slow
def test_the_checkout_command_runs_the_demo(checkout: Path, environment: dict[str, str]) -> None:
    demo, _tests = _commands("From a checkout")
    shown = _run(demo, checkout, environment)
    assert "each order is in the ledger exactly once" in shown
    assert str(checkout.parent / "site") in shown  # the shop that was installed


def test_the_checkout_commands_are_these_two() -> None:
    assert _commands("From a checkout") == [
        "python -m pip install . && cyclone-sqla demo",
        "python -m pip install nox && python -m nox -s tests",
    ]


def test_the_quickstart_is_fifteen_lines() -> None:
    (program,) = _blocks("python", "Quickstart")
    assert len(program) == 15


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (CHECKOUT / link).is_file()] == []

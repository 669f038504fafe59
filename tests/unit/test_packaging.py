"""What is in the packages that users install."""

import os
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from contextlib import closing
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[2]

_CASES = ("failure_modes", "jobs", "sequences", "unique")


def _build(target: str, source: Path, directory: Path) -> Path:
    """Build the "wheel" or "sdist" of `source`, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (package,) = directory.iterdir()
    return package


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", _CHECKOUT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _requirements(metadata: Message) -> list[str]:
    return [str(value) for value in metadata.get_all("Requires-Dist", [])]


def _files(folder: str) -> set[str]:
    paths = (_CHECKOUT / folder).rglob("*")
    kept = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(_CHECKOUT).as_posix() for path in kept}


def test_the_wheel_holds_the_package_with_its_types(names: set[str]) -> None:
    assert "cyclone_sqla/py.typed" in names
    assert names >= _files("cyclone_sqla")


def test_the_wheel_holds_the_migrations_inside_the_package(names: set[str]) -> None:
    scripts = {f"cyclone_sqla/_{name}" for name in _files("alembic")}
    assert "cyclone_sqla/_alembic/env.py" in scripts
    assert any(name.startswith("cyclone_sqla/_alembic/versions/") for name in scripts)
    assert names >= scripts


def test_an_installed_package_migrates_with_the_scripts_it_holds(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site-packages")
    program = (
        "import cyclone_sqla.migrations as m;"
        "print(m.__file__, m.migrate_database('sqlite:///shop.db'))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.startswith(str(tmp_path))
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM cyclone_job").fetchone() == (0,)


def test_the_wheel_holds_the_contract_as_tests_and_pytest_its_plugin(
    names: set[str], wheel: Path
) -> None:
    cases = {f"cyclone_sqla/testing/conformance/test_{name}.py" for name in _CASES}
    assert names >= cases | {"cyclone_sqla/testing/conformance/conftest.py"}
    assert dict(_entry_points(wheel)["pytest11"]) == {"cyclone-sqla": "cyclone_sqla.pytest_plugin"}


def test_the_wheel_holds_nothing_else(names: set[str]) -> None:
    places = {name.split("/")[0] for name in names}
    (information,) = places - {"cyclone_sqla"}
    assert information.endswith(".dist-info")


def test_a_wheel_made_from_the_sdist_is_the_same(names: set[str], tmp_path: Path) -> None:
    sdist = _build("sdist", _CHECKOUT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    with zipfile.ZipFile(_build("wheel", source, tmp_path / "wheel")) as archive:
        assert set(archive.namelist()) == names


def test_sqlite_users_need_no_library_of_postgresql(metadata: Message) -> None:
    always = [line for line in _requirements(metadata) if "extra ==" not in line]
    assert any(line.startswith("psycopg>") for line in always)
    assert not [line for line in always if "binary" in line or "psycopg2" in line]


def test_the_extras_are_named_in_the_metadata(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "async",
        "binary",
        "postgresql-tests",
        "test",
    }


def test_alembic_finds_the_plugin(wheel: Path) -> None:
    assert dict(_entry_points(wheel)["alembic.plugins"]) == {
        "alembic.autogenerate.cyclone": "cyclone_sqla.alembic_plugin"
    }


def _entry_points(wheel: Path) -> ConfigParser:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        points = ConfigParser()
        points.optionxform = str
        points.read_string(archive.read(name).decode())
    return points

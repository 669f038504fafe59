"""The pytest plugin, in the tests of a small application of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.databases import Database

CONFTEST = """
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from cyclone_sqla import Context, Cyclone

cyclone = Cyclone()

class Base(DeclarativeBase): ...

class Receipt(Base):
    __tablename__ = "receipt"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]

@cyclone.action
def receive(ctx: Context, number: int) -> None:
    ctx.session.add(Receipt(number=number))

@pytest.fixture(scope="session")
def cyclone_app():
    return cyclone

@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database):
    Base.metadata.create_all(cyclone_database)
"""

TESTS = """
import pytest
from sqlalchemy import func, select
from conftest import Receipt, receive

def count(env):
    return env.session.scalar(select(func.count()).select_from(Receipt))

@pytest.mark.parametrize("number", range({count}))
def test_a_commit_runs_the_job(cyclone_env, number):
    with cyclone_env.session.begin():
        receive.enqueue(cyclone_env.session, number=number)
    assert count(cyclone_env) == 1

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.cyclone(auto_start=False)
def test_a_job_waits(cyclone_env, number):
    with cyclone_env.session.begin():
        receive.enqueue(cyclone_env.session, number=number)
    assert count(cyclone_env) == 0
    assert cyclone_env.run_until_idle() == 1
    assert count(cyclone_env) == 1
"""


def run(directory: Path, *options: str, tests: int) -> "subprocess.CompletedProcess[str]":
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_receipts.py").write_text(TESTS.replace("{count}", str(tests // 2)))
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.sqlite
def test_two_hundred_tests_run_in_memory_with_no_set_up(tmp_path: Path) -> None:
    done = run(tmp_path, tests=200)
    assert "200 passed" in done.stdout, done.stdout
    assert done.returncode == 0


def test_a_url_leads_them_to_a_server_and_processes_share_it(
    tmp_path: Path, postgresql_database: Database
) -> None:
    options = ("-n", "2", "--cyclone-database-url", postgresql_database.url)
    done = run(tmp_path, *options, tests=20)
    assert "20 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.sqlite
def test_an_application_that_does_not_say_which_it_is_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(cyclone_env): ...\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "say which application is tested" in done.stdout

"""The private server of an application's tests: where it comes from, and that nothing remains."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from cyclone_sqla import ConfigurationError
from cyclone_sqla.testing import TemporaryPostgres
from cyclone_sqla.testing.postgresql import binaries, guard
from tests.waiting import wait_until

pytestmark = pytest.mark.postgresql

CHECKOUT = Path(__file__).parents[2]

SERVE_UNTIL_KILLED = """
import os, signal, sys
from cyclone_sqla.testing import TemporaryPostgres
from cyclone_sqla.testing.postgresql.guard import server_of

with TemporaryPostgres() as server:
    os.kill(server_of(server.data), signal.SIGSTOP)
    print(server.directory, flush=True)
    sys.stdin.read()
"""


def test_a_server_is_there_for_a_block_and_nothing_remains() -> None:
    with TemporaryPostgres({"max_connections": "7"}) as server:
        engine = sa.create_engine(server.database_url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            names = ("max_connections", "fsync", "listen_addresses")
            told = [connection.scalar(sa.text(f"SHOW {name}")) for name in names]
        pid = guard.server_of(server.data)
        assert pid is not None
        assert server.directory.stat().st_mode & 0o077 == 0
    assert told == ["7", "off", ""]
    assert not server.directory.exists()
    assert not psutil.pid_exists(pid)
    with pytest.raises(OperationalError):
        engine.connect()


def test_a_server_dies_with_a_killed_process_even_if_it_does_not_answer() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE_UNTIL_KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=CHECKOUT,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        pid = guard.server_of(guard.data_in(directory))
        assert pid is not None
        owner.kill()
        owner.communicate()
    wait_until(lambda: not directory.exists(), "the guard removes the directory")
    assert guard.server_of(guard.data_in(directory)) is None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_was_given_a_dead_servers_number_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "postmaster.pid").write_text(f"{stranger.pid}\n{tmp_path}\n")
        assert guard.server_of(tmp_path) is None
        guard.end_server(tmp_path)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing() -> None:
    server = TemporaryPostgres({"max_connections": "many"})
    with pytest.raises(ConfigurationError, match='"max_connections": "many"'), server:
        pass
    assert not server.directory.exists()


# ---- its programs --------------------------------------------------------------------------------


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory that every account can reach."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_a_wheel_that_the_account_cannot_reach_is_copied(tmp_path: Path, elsewhere: Path) -> None:
    bindir = binaries.wheel_binaries()
    assert bindir is not None
    hidden = hide(bindir.parents[2], tmp_path) / bindir.relative_to(bindir.parents[2])
    account = binaries.Account.unprivileged()
    copy = binaries.reachable(hidden, account, elsewhere)
    assert copy.is_relative_to(elsewhere)
    assert account.can_run(copy / "initdb")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_other_programs_that_the_account_cannot_reach_are_told(
    tmp_path: Path, elsewhere: Path
) -> None:
    bindir = binaries.find_binaries()
    hidden = hide(bindir.parent, tmp_path) / bindir.name
    with pytest.raises(ConfigurationError, match="as another user than root"):
        binaries.reachable(hidden, binaries.Account.unprivileged(), elsewhere)


def hide(directory: Path, inside: Path) -> Path:
    """The same directory under a path that is closed to all but root."""
    closed = inside / "closed"
    closed.mkdir(mode=0o700)
    (closed / "open").symlink_to(directory)
    return closed / "open"


def test_programs_are_found_on_the_machine_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in ("initdb", "postgres"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setattr(binaries, "wheel_binaries", lambda: None)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert binaries.find_binaries() == tmp_path


def test_a_missing_server_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(binaries.VARIABLE, os.fspath(tmp_path))
    with pytest.raises(ConfigurationError, match="no `initdb` and `postgres` in this directory"):
        TemporaryPostgres().__enter__()
    monkeypatch.delenv(binaries.VARIABLE)
    monkeypatch.setattr(binaries, "_candidates", lambda: iter([tmp_path]))
    with pytest.raises(ConfigurationError, match=r"cyclone-sqla\[postgresql-tests\].*give the URL"):
        binaries.find_binaries()

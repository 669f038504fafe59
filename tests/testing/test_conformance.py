"""The contract as a suite that anybody runs on their own database."""

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyclone_sqla import Cyclone
from tests.databases import Database

BREAKER = """
from cyclone_sqla.port import Queue
Queue.recover = lambda self, worker=None: 0
"""


def run(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "--pyargs", "cyclone_sqla.testing.conformance"]
    plugins = ("hypothesispytest", "timeout", "cacheprovider", "asyncio")
    options += tuple(word for name in plugins for word in ("-p", f"no:{name}"))
    done = subprocess.run(
        [*command, "-q", *options], cwd=directory, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def contents(database: Database) -> list[object]:
    """Tables of every schema, and the rows of ours."""
    with database.engine().connect() as connection:
        look = sa.inspect(connection)
        tables = [(s, look.get_table_names(schema=s)) for s in look.get_schema_names()]
        rows = connection.execute(sa.text("SELECT * FROM cyclone_job")).all()
        return [*tables, *rows]


def test_it_tells_what_holds_and_leaves_the_database_as_it_was(
    tmp_path: Path, database: Database
) -> None:
    with database.engine().begin() as connection:
        Cyclone().enqueue(connection, "work", {}, unique="order:1")
    before, files = contents(database), set(tmp_path.iterdir())

    told = run(tmp_path, "--cyclone-database-url", database.url, "-k", "holder or ready")

    assert f"the contract on {database.dialect}" in told
    assert "  holds    a duplicate can be answered with the holder" in told
    assert " passed" in told
    assert "failed" not in told
    assert contents(database) == before
    assert set(tmp_path.iterdir()) == files


@pytest.mark.sqlite
def test_what_is_broken_is_told(tmp_path: Path) -> None:
    (tmp_path / "breaker.py").write_text(BREAKER)

    told = run(tmp_path, "-p", "breaker", "-k", "recovered_jobs or renewed_lease")

    assert "  BROKEN   recovered jobs run again at once with their attempt counted" in told
    assert "  holds    a renewed lease counts from now" in told

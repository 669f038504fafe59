"""The contract as a suite that anybody runs on their own database."""

from pathlib import Path

import sqlalchemy as sa

from cyclone_sqla import Cyclone
from tests.databases import Database
from tests.testing.inner import run_pytest

BREAKER = """
from cyclone_sqla.port import Queue
Queue.recover = lambda self, worker=None: 0
"""


def run(directory: Path, *options: str) -> str:
    done = run_pytest(directory, "--pyargs", "cyclone_sqla.testing.conformance", *options)
    return done.stdout + done.stderr


def contents(database: Database) -> list[object]:
    """Tables of every schema, and the rows of ours."""
    with database.engine().connect() as connection:
        look = sa.inspect(connection)
        tables = [(s, look.get_table_names(schema=s)) for s in look.get_schema_names()]
        rows = connection.execute(sa.text("SELECT * FROM cyclone_job")).all()
        return [*tables, *rows]


def test_it_tells_what_holds_and_what_does_not_and_leaves_the_database_as_it_was(
    tmp_path: Path, database: Database
) -> None:
    with database.engine().begin() as connection:
        Cyclone().enqueue(connection, "work", {}, unique="order:1")
    (tmp_path / "breaker.py").write_text(BREAKER)
    before, files = contents(database), set(tmp_path.iterdir())

    cases = "answered_with_the_holder or recovered_jobs or ends_once"
    told = run(tmp_path, "--cyclone-database-url", database.url, "-p", "breaker", "-k", cases)

    assert f"the contract on {database.dialect}" in told
    assert "  holds    a duplicate can be answered with the holder" in told
    assert "  BROKEN   recovered jobs run again at once with their attempt counted" in told
    assert "  holds    a run ends once (completed; failed; failed for good)" in told
    assert "  BROKEN   a run ends once (recovered)" in told
    assert "1 of 3 hold" in told
    assert contents(database) == before
    assert set(tmp_path.iterdir()) == files

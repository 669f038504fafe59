"""Why the job table is one table: what a partitioned one could not promise; and an archive that is
one.
"""

from pathlib import Path

import pytest
import sqlalchemy as sa

from cyclone_sqla.models import Job
from tests.databases import Database


@pytest.mark.parametrize("column", ["created_at", "finished_at"])
def test_the_job_table_can_not_be_partitioned_by_time(
    postgresql_database: Database, column: str
) -> None:
    engine = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    uniques = [index for index in Job.__table__.indexes if index.unique]  # type: ignore[attr-defined]
    with engine.connect() as connection:
        connection.exec_driver_sql(
            f"CREATE TABLE parted (LIKE cyclone_job) PARTITION BY RANGE ({column})"
        )
        for index in uniques:
            columns = ", ".join(index.columns.keys())
            with pytest.raises(sa.exc.DBAPIError, match="must include all partitioning columns"):
                connection.exec_driver_sql(f"CREATE UNIQUE INDEX ON parted ({columns})")
    assert {index.name for index in uniques} >= {"cyclone_job_admitted", "cyclone_job_unique"}


PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "beyond-one-server.md"

ARCHIVE = """
CREATE TABLE job_archive (
    id bigint, kind text, state text, finished_at timestamptz, arguments json, last_error text,
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
CREATE TABLE job_archive_day PARTITION OF job_archive
    FOR VALUES FROM ('2026-01-01') TO ('2026-01-02')
"""


def test_ended_jobs_are_copied_into_a_partitioned_archive(postgresql_database: Database) -> None:
    copy = PAGE.read_text().partition("```sql\n")[2].partition("```")[0]
    engine = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in ARCHIVE.split(";"):
            connection.exec_driver_sql(statement)
        for day in ("2025-12-31", "2026-01-01", "2026-01-02"):
            connection.exec_driver_sql(
                "INSERT INTO cyclone_job (kind, queue, priority, state, arguments, run_at, "
                "max_attempts, created_at, updated_at, finished_at) VALUES ('work', 'default', 0, "
                f"'completed', '{{}}', '{day}', 25, '{day}', '{day}', '{day} 12:00')"
            )
        for _ in range(2):
            connection.exec_driver_sql(copy)
        kept = connection.exec_driver_sql("SELECT finished_at::date::text FROM job_archive")
        assert kept.scalars().all() == ["2026-01-01"]

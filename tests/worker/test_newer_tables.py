"""Tables that change while workers run, and workers that meet tables of another release."""

import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyclone_sqla import Worker, migrations, schema_version
from cyclone_sqla.errors import SchemaError
from tests.databases import Database
from tests.life.hands import Hands
from tests.migrations.moved_head import NEXT, move_head
from tests.worker.site import Site


def _nothing() -> None:
    pass


def test_an_additive_migration_leaves_running_workers_alone(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site, gate = Site(database), threading.Event()

    def wait() -> None:
        assert gate.wait(30.0)

    site.action(wait, kind="long")
    site.action(_nothing)
    with site.worker():
        long, short = site.enqueue("long"), site.enqueue()
        site.wait_for(short, "completed")
        site.wait_for(long, "running")
        site.enqueue_many(200, sequence="a")
        move_head(monkeypatch, tmp_path)
        migrations.migrate_database(database.url)
        site.wait_for(site.enqueue(), "completed")
        gate.set()
        site.wait_until_all_are("completed")
    assert migrations.check_database(database.url).current == NEXT
    assert caplog.records == []


def test_a_worker_outside_its_range_stops_at_start_and_says_in_one_line_what_to_run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, now = Site(database), schema_version.HEAD
    site.action(_nothing)
    move_head(monkeypatch, tmp_path)
    with pytest.raises(SchemaError) as caught:
        Worker(site.cyclone).start()
    assert str(caught.value) == (
        f"the tables are at revision {now}, this code needs {NEXT}; "
        f"run: {schema_version.migrate_command(site.engine.url, None)}"
    )


def test_a_plan_that_fits_no_more_costs_one_failed_step_and_its_connection(
    postgresql_database: Database,
) -> None:
    with closing(Hands(postgresql_database)) as hands:
        hands.enqueue()
        hands.claim(lease=timedelta(0))
        for _ in range(8):
            assert len(hands.expired()) == 1
        hands.execute("ALTER TABLE cyclone_job ALTER COLUMN worker TYPE varchar(500)")
        with pytest.raises(sa.exc.DBAPIError, match="cached plan must not change result type"):
            hands.expired()
        assert len(hands.expired()) == 1

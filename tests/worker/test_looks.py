"""A whole worker is seen by those who look: what it serves, what it runs, and that it is alive."""

import time

import pytest
import sqlalchemy as sa

from cyclone_sqla import WorkerSettings
from cyclone_sqla.settings import ALIVE_WITHIN
from tests.databases import Database
from tests.worker.site import Gate, Site, nothing


@pytest.fixture
def site(database: Database) -> Site:
    return Site(database)


def reason(site: Site, job_id: int) -> str:
    with site.engine.connect() as connection:
        return site.cyclone.explain(connection, job_id).reason


def test_a_worker_says_what_it_serves_and_is_seen_to_run_its_jobs(site: Site) -> None:
    gate = Gate()
    site.action(gate.passing())
    first, second = site.enqueue(), site.enqueue()
    rare, mail = site.enqueue("rare"), site.enqueue(queue="mail")
    assert {reason(site, job) for job in (first, second, rare, mail)} == {"no-worker"}

    with site.worker(queues={"default": 1}, lease=30) as worker:
        gate.await_arrival()
        assert [reason(site, job) for job in (first, second, rare, mail)] == [
            "running", "queue-saturated", "unknown-kind", "no-worker",
        ]  # fmt: skip
        with site.engine.connect() as connection:
            stats = site.cyclone.stats(connection)
        (seen,) = stats.workers
        assert (seen.id, seen.is_alive) == (worker.id, True)
        assert (seen.queues, seen.kinds) == ({"default": 1}, ("work",))
        gate.open()
        site.wait_for(second, "completed")

    assert [reason(site, job) for job in (first, rare)] == ["completed", "no-worker"]


def test_an_idle_worker_holds_no_transaction_open(postgresql_database: Database) -> None:
    """Neither while it sleeps nor, but for a moment, while it looks."""
    site = Site(postgresql_database)
    site.action(nothing)
    sessions = sa.text(
        "SELECT pid, state = 'idle in transaction'"
        " AND clock_timestamp() - state_change > interval '20 ms' AS holds_one"
        " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    looking = site.engine.execution_options(isolation_level="AUTOCOMMIT")
    with site.engine.connect() as other, looking.connect() as look, site.worker(poll=0.05):
        site.wait_for(site.enqueue(), "completed")  # it has made its connections
        other_pid = other.scalar(sa.text("SELECT pg_backend_pid()"))
        seen: set[int] = set()
        holding: set[int] = set()
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            found = look.execute(sessions).all()
            seen.update(session.pid for session in found)
            holding.update(session.pid for session in found if session.holds_one)
            time.sleep(0.005)
    assert len(seen) > 2, "the worker has sessions"
    assert holding == {other_pid}


@pytest.mark.parametrize("lease", [1.0, 60.0, 86_400.0])
def test_a_worker_reports_three_times_before_it_is_presumed_dead(lease: float) -> None:
    settings = WorkerSettings(lease=lease)
    assert settings.report_interval <= settings.renew_interval
    assert settings.report_interval * 3 <= ALIVE_WITHIN

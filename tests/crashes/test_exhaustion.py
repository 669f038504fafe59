"""Actions that leave nothing for others: memory, or the event loop."""

import time
from pathlib import Path

from cyclone_sqla import Context
from tests.crashes.fleet import PATIENCE, Fleet
from tests.databases import Database
from tests.worker.site import Site


def test_a_job_that_uses_up_the_memory_fails_and_its_worker_goes_on(
    tmp_path: Path, sqlite_database: Database
) -> None:
    fleet = Fleet(tmp_path, sqlite_database)
    greedy = fleet.site.enqueue("devour")
    with fleet.worker(concurrency=4, poll=0.1) as worker:
        fleet.site.wait_for(greedy, "completed", within=PATIENCE)
        fleet.enqueue_brief(20)
        fleet.site.wait_until_all_are("completed", within=PATIENCE)
        assert worker.is_alive()

    assert fleet.site.job(greedy).attempt == 2
    assert [entry.error for entry in fleet.site.history(greedy)] == ["MemoryError"]


def test_a_job_that_blocks_the_event_loop_for_longer_than_its_lease_keeps_it(
    database: Database,
) -> None:
    """It is renewed from a thread of its own, and no rescuer of another worker takes the job."""
    site, runs = Site(database, hints=False), list[int]()

    async def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        time.sleep(2.0)  # noqa: ASYNC251 - this is what is wrong with it

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=1.0), site.worker(lease=1.0):
        site.wait_for(job_id, "completed")

    assert runs == [1]
    assert site.history(job_id) == []

"""What one round of a busy worker does at once: settle, hand on, claim."""

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyclone_sqla import Context
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.operations import Claiming
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.work import CHAIN, HandOvers
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, nothing


def test_a_job_comes_with_its_headers_and_result_whichever_round_claimed_it(
    database: Database,
) -> None:
    site, seen = Site(database), list[tuple[int, Any]]()

    def work(ctx: Context) -> list[str]:
        seen.append((ctx.job.id, ctx.job.headers))
        return [f'"{ctx.job.id}", \\ and {{}}']

    site.action(work)
    fixed = {"q": '"{}\\,'}
    given = [{"n": str(n), **fixed} if n % 3 else {} for n in range(30)]
    ids = [site.enqueue(headers=headers or None) for headers in given]
    with site.worker(concurrency=2):
        site.wait_until_all_are("completed")

    assert sorted(seen) == list(zip(ids, given, strict=True))
    for id_ in ids:
        assert json.loads(site.job(id_).result or "") == [f'"{id_}", \\ and {{}}']


@pytest.mark.parametrize("others", [{}, {"other": 5}], ids=["of all", "of its queue"])
def test_an_urgent_job_does_not_wait_for_the_end_of_a_line_that_has_the_only_slot(
    database: Database, others: dict[str, int]
) -> None:
    site, order, gate = Site(database), list[str](), Gate()

    def work() -> None:
        if not order:
            gate()
        order.append("line")

    def urgent() -> None:
        order.append("urgent")

    site.action(work)
    site.action(urgent, kind="urgent")
    line = site.enqueue_many(round(CHAIN * 6000), sequence="a")  # far more than a chain may last
    with site.worker(queues={"default": 1, **others}):
        gate.await_arrival()
        site.enqueue("urgent", priority=-5)
        gate.open()
        site.wait_until_all_are("completed")

    assert order.index("urgent") < len(line)


def wanted(hand_overs: HandOvers, slots: int) -> Claiming:
    """What a worker with so many free slots asks for."""
    mode = hand_overs.may_go_on(), hand_overs.suffice({"default": slots})
    return Claiming({"default": slots}, ["work"], "w", timedelta(seconds=30), *mode)


def test_the_next_in_line_is_enough_from_a_look_that_left_slots_free_until_somebody_calls() -> None:
    hand_overs = HandOvers()
    first_look = wanted(hand_overs, 5)
    hand_overs.note(first_look, {"default": 2})
    after_the_look = wanted(hand_overs, 3)
    hand_overs.called()
    after_the_call = wanted(hand_overs, 3)
    hand_overs.note(after_the_call, {"default": 3})
    after_a_look_that_filled_all = wanted(hand_overs, 3)

    asked = (first_look, after_the_look, after_the_call, after_a_look_that_filled_all)
    assert [claim.only_next for claim in asked] == [False, True, False, False]


def test_a_call_during_a_look_asks_for_another_one() -> None:
    hand_overs = HandOvers()
    look = wanted(hand_overs, 5)
    hand_overs.called()
    hand_overs.note(look, {"default": 2})
    assert not wanted(hand_overs, 3).only_next


def test_others_are_looked_for_from_time_to_time_though_nobody_calls() -> None:
    hand_overs = HandOvers()
    hand_overs.note(wanted(hand_overs, 5), {"default": 2})
    hand_overs.note(wanted(hand_overs, 5), {"default": 1})  # the next of a line
    time.sleep(CHAIN)
    assert not wanted(hand_overs, 5).only_next


def test_jobs_that_come_one_after_the_other_stay_in_their_thread_and_wake_nobody(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, starters = Site(database), Counter[str]()

    def starting(executor: Executor, jobs: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        starters[threading.current_thread().name.rstrip("-0123456789")] += len(jobs)
        return start(executor, jobs)

    start = Executor.start_runs
    monkeypatch.setattr(Executor, "start_runs", starting)
    site.action(nothing)
    site.enqueue_many(300, sequence="a")
    with site.worker(concurrency=5):
        site.wait_until_all_are("completed")

    assert starters["cyclone-action"] > starters["cyclone-work"]


def test_a_turn_that_fails_in_the_thread_of_a_run_is_taken_again_by_the_loop(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site, ran = Site(postgresql_database), list[int]()

    def work(ctx: Context) -> None:
        if len(ran) % 50 == 49:
            site.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        ran.append(ctx.job.id)

    site.action(work)
    line = site.enqueue_many(150, sequence="a")
    with caplog.at_level("INFO", "cyclone_sqla.worker"), site.worker(concurrency=5) as worker:
        wait_until(lambda: len(ran) >= len(line), "all have run")  # whoever asks is cut off too
        site.wait_until_all_are("completed")
        wait_until(lambda: worker.is_healthy, "every loop works again")

    assert ran == line
    told = messages(caplog.records)
    assert sum(text.startswith("the work loop failed") for text in told) == 3
    assert sum(text.startswith("the work loop works again") for text in told) == 3


def test_a_stop_ends_a_line_that_goes_on_in_the_thread_of_its_runs(database: Database) -> None:
    site, ran, is_going = Site(database), list[int](), Gate()
    is_going.open()

    def work(ctx: Context) -> None:
        ran.append(ctx.job.id)
        is_going()

    site.action(work)
    line = site.enqueue_many(3000, sequence="a")
    with site.worker(concurrency=5) as worker:
        is_going.await_arrival(40)
        assert worker.stop()

    assert len(ran) < len(line)
    assert ran == line[: len(ran)]
    states = site.states()
    assert (states["completed"], states["running"]) == (len(ran), 0)


@contextmanager
def role_without_temporary_objects(database: Database) -> Iterator[str]:
    """An account that may do everything with our tables, and make nothing temporary."""
    role = f"plain_{uuid.uuid4().hex[:8]}"
    admin = database.engine(isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        name = connection.scalar(sa.text("SELECT current_database()"))
        for right in (
            f"CREATE ROLE {role} LOGIN",
            f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
            f'REVOKE TEMPORARY ON DATABASE "{name}" FROM PUBLIC',
        ):
            connection.exec_driver_sql(right)
        try:
            yield role
        finally:
            connection.exec_driver_sql(f'GRANT TEMPORARY ON DATABASE "{name}" TO PUBLIC')
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_worker_whose_account_may_make_nothing_temporary_works_in_order_all_the_same(
    postgresql_database: Database,
) -> None:
    with role_without_temporary_objects(postgresql_database) as role:
        engine = sa.create_engine(sa.make_url(postgresql_database.url).set(username=role))
        site = Site(postgresql_database, engine=engine)
        site.action(nothing)
        site.enqueue_many(20, sequence="a")
        site.enqueue_many(20)
        with site.worker(concurrency=2):
            site.wait_until_all_are("completed")
        with engine.connect() as connection, pytest.raises(sa.exc.ProgrammingError):
            connection.exec_driver_sql("CREATE TEMPORARY TABLE proof (id int)")
        engine.dispose()

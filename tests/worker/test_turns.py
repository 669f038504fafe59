"""What one round of a busy worker does at once: settle, hand on, claim."""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyclone_sqla import Context
from cyclone_sqla.operations import Claiming
from cyclone_sqla.worker.work import CHAIN, HandOvers
from tests.databases import Database
from tests.worker.site import Gate, Site, nothing


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


def test_an_urgent_job_does_not_wait_for_the_end_of_a_line_that_has_the_only_slot(
    database: Database,
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
    with site.worker(concurrency=1):
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
    hand_overs.note(first_look, 2)
    after_the_look = wanted(hand_overs, 3)
    hand_overs.called()
    after_the_call = wanted(hand_overs, 3)
    hand_overs.note(after_the_call, 3)
    after_a_look_that_filled_all = wanted(hand_overs, 3)

    asked = (first_look, after_the_look, after_the_call, after_a_look_that_filled_all)
    assert [claim.only_next for claim in asked] == [False, True, False, False]


def test_others_are_looked_for_from_time_to_time_though_nobody_calls() -> None:
    hand_overs = HandOvers()
    hand_overs.note(wanted(hand_overs, 5), 2)
    hand_overs.note(wanted(hand_overs, 5), 1)  # the next of a line
    time.sleep(CHAIN)
    assert not wanted(hand_overs, 5).only_next


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

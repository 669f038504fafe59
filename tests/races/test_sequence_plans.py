"""What sequences cost beside 200,000 blocked jobs of one key, with statistics of odd moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from cyclone_sqla import Job, JobSpec, admission, operations
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.dialects.floors import Floor
from cyclone_sqla.dialects.postgresql import PostgresDialect
from tests.races.actors import Race

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BLOCKED = 200_000

FILL = """
INSERT INTO cyclone_job (kind, queue, priority, state, waits_for, arguments, sequence_key,
    sequence_open, admitted, run_at, max_attempts, created_at, updated_at)
SELECT 'work', 'default', 0, CASE WHEN n = 1 THEN 'paused' ELSE 'pending' END,
    CASE WHEN n = 1 THEN NULL ELSE 'turn' END, '{}', 'hot', true,
    CASE WHEN n = 1 THEN true END, now(), 25, now(), now()
FROM generate_series(1, :count) AS n
"""


def nothing_known(race: Race) -> None:
    """The server knows of an empty table."""
    execute(race, "ANALYZE cyclone_job")
    fill(race)


def all_of_one_key(race: Race) -> None:
    """Every row that the server knows of is blocked in one key."""
    fill(race)
    execute(race, "ANALYZE cyclone_job")


def before_the_heads(race: Race) -> None:
    """Many keys were incoming when the statistics were taken, and no head was there."""
    application = race.application()
    race.cyclone.enqueue_many(
        application.connection,
        [JobSpec(kind="work", arguments="{}", sequence=f"early-{n}") for n in range(3_000)],
    )
    application.commit()
    execute(race, "ANALYZE cyclone_job")
    fill(race)
    worker = race.worker()
    for _ in range(3):
        worker.admit(limit=1_000)
        worker.commit()


def fill(race: Race) -> None:
    execute(race, FILL, count=BLOCKED)


def execute(race: Race, sql: str, **params: Any) -> None:
    with race.engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text(sql), params)


MOMENTS = [nothing_known, all_of_one_key, before_the_heads]


@pytest.fixture(params=MOMENTS, ids=lambda moment: moment.__name__)
def crowded(race: Race, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Race:
    """A hot key whose head is paused, with its statistics; and nobody refreshes them."""
    # One by one: what goes through a pipeline is seen by no listener.
    monkeypatch.setattr(PostgresDialect, "run", Dialect.run)
    execute(race, "ALTER TABLE cyclone_job SET (autovacuum_enabled = false)")
    request.param(race)
    return race


def plans(race: Race, act: Callable[[], object]) -> list[tuple[str, dict[str, Any]]]:
    """The plans of all statements on jobs that the act sends, each run where it was sent."""
    found: list[tuple[str, dict[str, Any]]] = []
    is_explaining = False

    def explain(connection: Any, _cursor: Any, statement: str, params: Any, *_: Any) -> None:
        nonlocal is_explaining
        if is_explaining or "cyclone_job" not in statement:
            return
        is_explaining = True
        try:
            connection.exec_driver_sql("SAVEPOINT before")
            sql = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}"
            (plan,) = connection.exec_driver_sql(sql, params).scalar()
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT before")
        finally:
            is_explaining = False
        found.append((statement, plan["Plan"]))

    event.listen(race.worker_engine, "before_cursor_execute", explain)
    try:
        act()
    finally:
        event.remove(race.worker_engine, "before_cursor_execute", explain)
    return found


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def touched(node: dict[str, Any]) -> float:
    """Rows that a node has looked at, all in all."""
    rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    rows += node.get("Rows Removed by Index Recheck", 0)
    return float(rows * node["Actual Loops"])


def assert_flat(found: list[tuple[str, dict[str, Any]]], limit: int) -> None:
    assert found
    for statement, plan in found:
        for node in nodes(plan):
            told = f"{node['Node Type']} {node.get('Index Name', '')}: {touched(node)} rows"
            assert touched(node) <= limit, f"{told}\n{statement}"
            if node.get("Relation Name") == "cyclone_job":
                assert node["Node Type"] != "Seq Scan", f"{told}\n{statement}"


def test_admission_and_hand_over_look_at_no_blocked_job(crowded: Race) -> None:
    application, person, worker = crowded.application(), crowded.application(), crowded.worker()
    ids = [application.enqueue(key) for key in ("hot", "x", "x", "y", "y", "z", "z")]
    application.commit()

    assert_flat(plans(crowded, worker.admit), limit=100)
    worker.commit()
    jobs = [job for job in worker.claim(4000) if job.id in ids]
    worker.commit()
    assert len(jobs) == 3
    assert_flat(plans(crowded, lambda: worker.settle(*jobs)), limit=100)
    worker.commit()
    person.act("cancel", ids[4])
    person.commit()
    assert_flat(plans(crowded, worker.pay), limit=100)
    worker.commit()

    def look() -> None:
        operations.look_ahead(worker.connection, crowded.dialect)

    assert_flat(plans(crowded, look), limit=100)
    worker.commit()


def test_a_look_along_the_lines_steps_from_key_to_key(crowded: Race) -> None:
    application, worker = crowded.application(), crowded.worker()
    for key in ("x", "y", "z"):
        application.enqueue(key)
        application.enqueue(key)
    application.commit()
    worker.settle_down()

    def sweep() -> None:
        window = admission.sweep(worker.connection, crowded.dialect, "h", 4)
        assert (window.looked_at, window.headless) == (4, [])

    assert_flat(plans(crowded, sweep), limit=100)
    worker.commit()


def test_a_lost_head_in_front_of_the_hot_key_is_mended_at_the_same_cost(crowded: Race) -> None:
    worker = crowded.worker()
    execute(crowded, "DELETE FROM cyclone_job WHERE sequence_key = 'hot' AND admitted")

    def mend() -> None:
        window = admission.sweep(worker.connection, crowded.dialect, "h", 10)
        assert window.headless == ["hot"]
        assert len(admission.mend(worker.connection, crowded.dialect, window.headless)) == 1

    assert_flat(plans(crowded, mend), limit=200)
    worker.commit()


def test_the_next_of_the_hot_key_itself_costs_no_more(crowded: Race) -> None:
    person, worker = crowded.application(), crowded.worker()
    head = next(row.id for row in crowded.rows("hot") if row.admitted)
    person.act("cancel", head)
    person.commit()
    assert_flat(plans(crowded, worker.pay), limit=100)
    worker.commit()
    (job,) = [job for job in worker.claim(4000) if job.sequence_key == "hot"]
    worker.commit()
    assert_flat(plans(crowded, lambda: worker.settle(job)), limit=100)
    worker.commit()


def test_what_a_turn_of_a_lone_head_is_made_of_looks_at_no_blocked_job(crowded: Race) -> None:
    assert isinstance(crowded.dialect, PostgresDialect)
    turns = crowded.dialect.turns
    application, worker = crowded.application(), crowded.worker()
    first, second = (application.enqueue("x") for _ in range(2))
    application.commit()
    worker.settle_down()
    (job,) = [job for job in worker.claim(4000) if job.id == first]
    worker.commit()
    found: list[int] = []

    def turn() -> None:
        now = {"now": crowded.dialect.now()}
        done = {"one_id": job.id, "one_lease": job.lease, "one_result": None}
        worker.connection.execute(turns.complete_one, {**done, **now})
        served = {"kinds_kind": ["work"], "wanted_queue": ["default"], "wanted_slots": [4000]}
        released = {"key": "x", **served, **now}
        next_id, _ = worker.connection.execute(turns.next_to_claim, released).one()
        no_floors = {f"floors_{name}": [] for name in Floor._fields}
        lease = {"claimed_by": "worker", "lease_length": timedelta(minutes=1)}
        values = {**served, **lease, **now, **no_floors}
        claim_next, claim = turns.claim_next.returning(Job.id), turns.claim.returning(Job.id)
        found.extend(worker.connection.scalars(claim_next, {**values, "next_ids": [next_id]}))
        found.extend(worker.connection.scalars(claim, values))

    assert_flat(plans(crowded, turn), limit=100)
    assert found == [second]
    worker.commit()


def test_what_a_turn_of_several_heads_is_made_of_looks_at_no_blocked_job(crowded: Race) -> None:
    assert isinstance(crowded.dialect, PostgresDialect)
    turns = crowded.dialect.turns
    application, worker = crowded.application(), crowded.worker()
    firsts, seconds = ([application.enqueue(key) for key in "xyz"] for _ in range(2))
    application.commit()
    worker.settle_down()
    jobs = [job for job in worker.claim(4000) if job.id in firsts]
    worker.commit()
    found: list[int] = []

    def turn() -> None:
        now = {"now": crowded.dialect.now()}
        done = {name: [getattr(job, name) for job in jobs] for name in ("id", "lease")}
        done |= {"result": [None for _ in jobs]}
        ended = {f"done_{name}": values for name, values in done.items()}
        worker.connection.execute(turns.complete, {**ended, **now})
        served = {"kinds_kind": ["work"], "wanted_queue": ["default"], "wanted_slots": [4000]}
        released = {"released_id": firsts, **served, **now}
        nexts = worker.connection.execute(turns.nexts_to_claim, released).all()
        assert [row.left_id for row in nexts] == firsts
        lease = {"claimed_by": "worker", "lease_length": timedelta(minutes=1)}
        values = {**lease, **now, "next_ids": [row.id for row in nexts]}
        claim_next = turns.claim_next.returning(Job.id)
        found.extend(worker.connection.scalars(claim_next, values))

    assert_flat(plans(crowded, turn), limit=100)
    assert found == seconds
    worker.commit()

"""Many jobs in every state, statistics taken at odd moments, and all that a worker ever asks."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from cyclone_sqla import Job, JobSpec, WorkerSettings, admission, operations
from cyclone_sqla.models import IdempotencyKey
from cyclone_sqla.outcomes import CancelledOutcome, GivenBack
from cyclone_sqla.worker.maintenance import Pruner
from cyclone_sqla.worker.rhythm import Rhythm
from tests.life.hands import BROKE, DONE, FAILED, HOPELESS, NOT_NOW, Hands

CROWD = 30_000
WALL = 100_000

DAY = timedelta(days=1)

Moment = Callable[[Hands, Callable[[], None]], None]
"""Makes a crowd and has statistics taken at some moment of that."""


def never(hands: Hands, _analyze: Callable[[], None]) -> None:
    """There are no statistics."""
    mix(hands, CROWD)


def when_empty(hands: Hands, analyze: Callable[[], None]) -> None:
    """They say that there are no jobs."""
    analyze()
    mix(hands, CROWD)


def when_all_were_available(hands: Hands, analyze: Callable[[], None]) -> None:
    """They say that every job is available and none runs, has ended or is due."""
    hands.enqueue_many(CROWD)
    analyze()
    mix(hands, 0)


def when_all_had_ended(hands: Hands, analyze: Callable[[], None]) -> None:
    """They say that every job is completed."""
    hands.enqueue_many(CROWD)
    change(hands, sa.true(), state="completed", finished_at=hands.clock.now())
    analyze()
    change(hands, sa.true(), state="available", finished_at=None)
    mix(hands, 0)


def afterwards(hands: Hands, analyze: Callable[[], None]) -> None:
    """They are right."""
    mix(hands, CROWD)
    analyze()


def when_there_was_a_wall(hands: Hands, analyze: Callable[[], None]) -> None:
    """They know only a wall of available jobs of another kind, which stands in front."""
    hands.enqueue_many(WALL, "other")
    analyze()
    mix(hands, 2_000)


MOMENTS: tuple[Moment, ...] = (
    never,
    when_empty,
    when_all_were_available,
    when_all_had_ended,
    afterwards,
    when_there_was_a_wall,
)


def mix(hands: Hands, more: int) -> None:
    """Enqueue `more` jobs and bring all of this kind into every state there is."""
    if more:
        hands.enqueue_many(more)
    now = hands.clock.now()
    ours = Job.kind == "work"
    share = Job.id % 20
    change(hands, ours & (share < 10), state="completed", finished_at=now)
    change(hands, ours & (share == 10), state="completed", finished_at=now - 30 * DAY)
    change(hands, ours & (share == 11), state="cancelled", finished_at=now - 30 * DAY)
    change(hands, ours & share.in_([12, 13]), kind="other")
    later = {"state": "pending", "waits_for": "time", "run_at": now + 30 * DAY}
    change(hands, ours & (share == 14), **later)
    change(hands, ours & (share == 15), state="pending", waits_for="turn")
    change(hands, ours & (share == 16), state="discarded", dead_letter=True, finished_at=now - DAY)
    first = sa.select(sa.func.min(Job.id)).where(ours).scalar_subquery()
    lapsed = (Job.id >= first) & (Job.id < first + 1_000)
    change(hands, lapsed, **RUNNING_ELSEWHERE, leased_until=now - DAY)
    due = {"state": "pending", "waits_for": "retry", "run_at": now - DAY}
    change(hands, (Job.id >= first + 1_000) & (Job.id < first + 1_500), **ACTIVE, **due)
    add_keys(hands)


ACTIVE: dict[str, Any] = {"finished_at": None, "dead_letter": None, "leased_until": None}
RUNNING_ELSEWHERE: dict[str, Any] = {
    "state": "running",
    "waits_for": None,
    "finished_at": None,
    "dead_letter": None,
    "worker": "elsewhere",
    "lease": 1,
    "attempt": 1,
}


def change(hands: Hands, which: sa.ColumnElement[bool], **values: Any) -> None:
    with hands.engine.begin() as connection:
        connection.execute(sa.update(Job).where(which).values(**values))


def add_keys(hands: Hands) -> None:
    created_at = hands.clock.now() - 90 * DAY
    keys = [
        {"kind": "work", "key": str(number), "queue": "default", "created_at": created_at}
        for number in range(2_000)
    ]
    with hands.engine.begin() as connection:
        connection.execute(sa.insert(IdempotencyKey), keys)


def a_whole_life(hands: Hands) -> None:
    """Everything that a worker and a producer ever execute, at least once."""
    produce(hands)
    claim_and_settle(hands)
    take_care(hands)


def produce(hands: Hands) -> None:
    with hands.engine.begin() as connection:
        hands.cyclone.enqueue(connection, "work", {})
        hands.cyclone.enqueue(connection, "work", {}, unique="k", on_duplicate="return")
        hands.cyclone.enqueue(connection, "work", {}, unique="k", on_duplicate="return")
        hands.cyclone.enqueue(connection, "work", {}, idempotency_key="new")
        hands.cyclone.enqueue(connection, "work", {}, idempotency_key="new")
        specs = [JobSpec(kind="work", arguments="{}", unique=f"m{n}") for n in range(5)]
        hands.cyclone.enqueue_many(connection, specs, on_duplicate="return")
        hands.cyclone.enqueue_many(connection, specs, on_duplicate="return")
        hands.cyclone.enqueue_many(connection, [JobSpec(kind="work", arguments="{}")] * 5)


def claim_and_settle(hands: Hands) -> None:
    jobs = hands.claim(70, queues=["default", "mail"], kinds=["work", "rare", "none"])
    assert len(jobs) == 70
    hands.renew(*jobs)
    with hands.held.reading() as connection:
        hands.dialect.may_find_work(connection, ["default"], ["work", "rare"])
        operations.held_by(connection, hands.dialect, "worker-1")
        operations.present(connection, hands.dialect)
        operations.is_there(connection, hands.dialect, jobs[0].id)
    hands.settle_all([(job, DONE) for job in jobs[:40]])
    hands.settle_all([(job, DONE) for job in jobs[:5]])
    others = [FAILED, NOT_NOW, HOPELESS, CancelledOutcome(BROKE), GivenBack()]
    pairs = [(job, others[i % 5]) for i, job in enumerate(jobs[40:])]
    hands.settle_all(pairs, history_limit=1)
    again = hands.claim(5)
    hands.settle_all([(job, FAILED) for job in again], history_limit=0)
    one = hands.enqueue()
    with hands.transaction() as connection:
        claimed = operations.claim_this(connection, hands.dialect, one, "worker-1", DAY)
    assert claimed is not None


def take_care(hands: Hands) -> None:
    with hands.held.reading() as connection:
        operations.look_ahead(connection, hands.dialect)
        admission.sweep(connection, hands.dialect, "", 500)
    assert len(hands.stage(30)) == 30
    lapsed = hands.expired(30)
    assert len(hands.rescue(lapsed).states) == 30
    with hands.transaction() as connection:
        recovered = operations.recover(
            connection, hands.dialect, limit=100, history_limit=25, worker="worker-1"
        )
    assert recovered.states
    settings = WorkerSettings(prune_dead_letters=3_600.0)
    pruner = Pruner(hands.dialect, hands.held, settings, Rhythm(60.0, threading.Event()))
    while pruner.prune_batch():
        pass
    record = {
        "id": "w", "name": "w", "host": "h", "pid": 1, "queues": {"default": 1}, "kinds": ["work"],
    }  # fmt: skip
    with hands.transaction() as connection:
        operations.announce(connection, hands.dialect, record)
        operations.beat(connection, hands.dialect, "w")
        operations.forget_workers(connection, hands.dialect, DAY)
        operations.withdraw(connection, hands.dialect, "w")

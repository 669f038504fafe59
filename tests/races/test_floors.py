"""A worker's claims look on from where the last one ended, and still find whatever comes below."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import count

import pytest
import sqlalchemy as sa

from cyclone_sqla import operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import floors
from cyclone_sqla.dialects.floors import Floors
from cyclone_sqla.dialects.postgresql import FLOORS
from cyclone_sqla.operations import Claiming
from cyclone_sqla.outcomes import Retried
from cyclone_sqla.settings import DEFAULT_SETTINGS
from tests.databases import Database
from tests.life.hands import BROKE, DONE, HOPELESS, MINUTE, Hands

AT_ONCE = Retried(timedelta(0), BROKE)


class Claimer:
    """A worker's connection; the clock of its floors goes on by one at every look at it, so that
    they stand for as many claims every time.
    """

    def __init__(self, hands: Hands, *, takes_turns: bool = True) -> None:
        self._dialect = hands.dialect
        self._takes_turns = takes_turns
        self.held = hands.dialect.hold(hands.worker_engine, DEFAULT_SETTINGS, takes_turns=True)
        ticks = count(1)
        with self.held.step() as connection:
            connection.info[FLOORS] = Floors(lambda: float(next(ticks)))

    def close(self) -> None:
        """Disconnect."""
        self.held.close()

    def claim(self, *queues: str, slots: int = 1) -> list[int]:
        """The ids of what it gets of each queue."""
        with self.held.step() as connection:
            return [job.id for job in self.claim_on(connection, *queues, slots=slots)]

    def claim_on(self, connection: sa.Connection, *queues: str, slots: int = 1) -> list[ClaimedJob]:
        """The same in an open transaction."""
        wanted = Claiming(dict.fromkeys(queues or ["default"], slots), ["work"], "w", MINUTE)
        if not self._takes_turns:
            return operations.claim(connection, self._dialect, wanted)
        _, claimed = operations.settle_and_claim(
            connection, self._dialect, [], wanted, history_limit=25
        )
        return claimed


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database)) as hands:
        yield hands


@pytest.fixture
def claimer(hands: Hands) -> Iterator[Claimer]:
    with closing(Claimer(hands)) as claimer:
        yield claimer


# ---- what comes below: each is prepared first, and then makes a job available and says which -----

Arrival = Callable[[], int]


def late_commit(hands: Hands) -> Arrival:
    """An id was drawn long before its commit."""
    connection = hands.engine.connect()
    transaction = connection.begin()
    ref = hands.cyclone.enqueue(connection, "work", {})

    def arrive() -> int:
        transaction.commit()
        connection.close()
        return ref.id

    return arrive


def retry(hands: Hands) -> Arrival:
    """An attempt fails."""
    hands.enqueue()
    job = hands.claim_one()

    def arrive() -> int:
        hands.settle(job, AT_ONCE)
        return job.id

    return arrive


def replay(hands: Hands) -> Arrival:
    """Somebody replays a dead letter."""
    hands.enqueue()
    job = hands.claim_one()
    hands.settle(job, HOPELESS)

    def arrive() -> int:
        hands.act("replay", job.id)
        return job.id

    return arrive


def urgency(hands: Hands) -> Arrival:
    """A job that goes before others."""
    return lambda: hands.enqueue(priority=-1)


def unlocking(hands: Hands) -> Arrival:
    """Somebody had it locked."""
    job_id = hands.enqueue()
    connection = hands.engine.connect()
    connection.execute(hands.dialect.sql.wait_for, {"id": job_id})

    def arrive() -> int:
        connection.rollback()
        connection.close()
        return job_id

    return arrive


ARRIVALS = pytest.mark.parametrize(
    "arrival", [late_commit, retry, replay, urgency, unlocking], ids=lambda made: made.__name__
)


@ARRIVALS
def test_what_comes_below_a_floor_is_claimed_though_there_is_always_more_above(
    hands: Hands, claimer: Claimer, arrival: Callable[[Hands], Arrival]
) -> None:
    arrive = arrival(hands)
    ids = hands.enqueue_many(40)
    assert claimer.claim() == ids[:1]

    below = arrive()

    assert claimer.claim() == ids[1:2], "there is no floor"
    claimed = [job_id for _ in range(round(floors.STANDS)) for job_id in claimer.claim()]
    assert below in claimed
    above = [job_id for job_id in claimed if job_id != below]
    assert above == ids[2 : len(above) + 2]


@ARRIVALS
def test_what_comes_below_a_floor_is_claimed_at_once_where_slots_would_stay_empty(
    hands: Hands, claimer: Claimer, arrival: Callable[[Hands], Arrival]
) -> None:
    arrive = arrival(hands)
    ids = hands.enqueue_many(6)
    assert claimer.claim(slots=5) == ids[:5]

    below = arrive()

    assert sorted(claimer.claim(slots=5)) == sorted([below, ids[5]])


def test_a_full_look_goes_on_from_where_it_found_something(hands: Hands, claimer: Claimer) -> None:
    arrivals = [late_commit(hands) for _ in range(3)]
    hands.enqueue_many(60)
    claimer.claim()
    below = [arrive() for arrive in arrivals]

    claimed = [job_id for _ in range(2 * round(floors.STANDS)) for job_id in claimer.claim()]

    places = [claimed.index(job_id) for job_id in sorted(below)]
    assert places == list(range(places[0], places[0] + 3))


def test_a_claim_that_settles_nothing_finds_it_too(hands: Hands) -> None:
    with closing(Claimer(hands, takes_turns=False)) as claimer:
        arrive = late_commit(hands)
        ids = hands.enqueue_many(6)
        assert claimer.claim(slots=3) == ids[:3]
        below = arrive()
        assert claimer.claim(slots=1) == ids[3:4]
        assert sorted(claimer.claim(slots=3)) == [below, *ids[4:]]


def test_no_queue_keeps_its_floors_because_full_looks_are_always_at_another_one(
    hands: Hands, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "STANDS", 8.0)  # then every full look is at the first of the two
    hands.enqueue_many(100, queue="first")
    late = hands.enqueue(queue="second", priority=1)
    hands.enqueue_many(100, queue="second", priority=2)
    job = hands.claim_one(queues=["second"])
    assert job.id == late
    for queue in ("first", "second") * 2:
        claimer.claim(queue)
    hands.settle(job, AT_ONCE)

    claimed = [
        job_id for _ in range(2 * 8) for q in ("first", "second") for job_id in claimer.claim(q)
    ]

    assert late in claimed


def test_claims_do_not_walk_what_was_claimed_before_while_an_old_transaction_lives(
    hands: Hands, claimer: Claimer
) -> None:
    with hands.engine.connect() as old:
        old.execution_options(isolation_level="REPEATABLE READ")
        old.execute(sa.text("SELECT count(*) FROM cyclone_job"))
        hands.enqueue_many(2_000)
        while jobs := hands.claim(500):
            hands.settle_all([(job, DONE) for job in jobs])
        hands.enqueue_many(100)

        reads = [entries_read_by_a_claim(claimer) for _ in range(4)]

    assert reads[0] >= 2_000
    assert max(reads[1:]) < 100


ENTRIES_READ = sa.text("SELECT pg_stat_get_xact_tuples_returned('cyclone_job_available'::regclass)")


def entries_read_by_a_claim(claimer: Claimer) -> int:
    """Entries of the index of available jobs, dead ones included."""
    with claimer.held.transaction() as connection:
        before = int(connection.scalar(ENTRIES_READ) or 0)
        assert len(claimer.claim_on(connection, slots=10)) == 10
        return int(connection.scalar(ENTRIES_READ) or 0) - before

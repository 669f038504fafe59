"""A session's time zone changes no time: a day that it makes 23 hours long has 24 for a job."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event

from cyclone_sqla import JobSpec
from cyclone_sqla.outcomes import Retried
from tests.databases import Database
from tests.life.hands import BROKE, Hands

BEFORE_SUMMER = datetime(2030, 3, 30, 12, tzinfo=UTC)
"""In Berlin the next day has 23 hours."""

TWO_DAYS = timedelta(days=2)


class BerlinClock:
    def now(self) -> datetime:
        return BEFORE_SUMMER


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database, BerlinClock())) as hands:
        for engine in (hands.engine, hands.worker_engine):
            event.listen(engine, "connect", _move_to_berlin)
        with hands.engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW timezone").scalar() == "Europe/Berlin"
        yield hands


def _move_to_berlin(connection: Any, _record: object) -> None:
    connection.execute("SET timezone = 'Europe/Berlin'")
    connection.commit()


def test_a_delay_of_days_is_that_of_24_hours_each(hands: Hands) -> None:
    alone = hands.enqueue(process_in=TWO_DAYS)
    with hands.engine.begin() as connection:
        spec = JobSpec(kind="work", arguments="{}", process_in=TWO_DAYS)
        many = hands.cyclone.enqueue_many(connection, [spec, spec])
    moved = hands.enqueue(process_in=5)
    with hands.engine.begin() as connection:
        hands.cyclone.reschedule(connection, moved, process_in=TWO_DAYS)
    retried = hands.enqueue()
    hands.settle(hands.claim()[0], Retried(TWO_DAYS, BROKE))

    due = {hands.job(i).run_at for i in (alone, moved, retried, *(ref.id for ref in many))}
    assert due == {BEFORE_SUMMER + TWO_DAYS}

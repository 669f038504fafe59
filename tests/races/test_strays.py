"""Jobs without a position in a sequence that becomes numbered at that very moment: they have no
place there, keep nobody, and are told so.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from sqlalchemy import Connection, event

from cyclone_sqla import explanations
from cyclone_sqla.figures import Count
from tests.databases import Database
from tests.races.actors import Race

STRAY = explanations.Unpositioned(key="k")


@pytest.fixture
def race(database: Database) -> Iterator[Race]:
    """Actors on a fresh database of either kind: even one writer is preceded by a look."""
    with closing(Race(database)) as actors:
        yield actors


def after_its_look(connection: Connection, meanwhile: Callable[[], None]) -> None:
    """Once the next enqueue has seen that its key has no jobs without a position."""
    acted: list[str] = []

    def act(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if "has_unpositioned" in statement and not acted:
            acted.append(statement)
            meanwhile()

    event.listen(connection, "after_cursor_execute", act)


def why(race: Race, job_id: int) -> list[explanations.Reason]:
    """What keeps a job, but for workers: none of these says that it lives."""
    with race.engine.connect() as connection:
        reasons = race.cyclone.explain(connection, job_id).reasons
    return [reason for reason in reasons if reason.code != "no-worker"]


def test_a_job_at_its_turn_in_a_key_that_becomes_numbered_has_lost_its_place_and_is_told_so(
    race: Race,
) -> None:
    positioned, other, worker = race.application(), race.application(), race.worker()
    strays: list[int] = []

    def enqueue_and_admit() -> None:
        strays.extend(other.enqueue("k") for _ in range(3))
        other.commit()
        worker.settle_down()

    after_its_look(positioned.connection, enqueue_and_admit)
    numbered = [positioned.enqueue("k", position=1), positioned.enqueue("k", position=5)]
    positioned.commit()
    worker.settle_down()
    head, *left = strays

    assert [race.state(job_id) for job_id in strays] == ["available", *["pending/turn"] * 2]
    assert [why(race, job_id) for job_id in left] == [[STRAY], [STRAY]]
    (first,) = why(race, numbered[0])
    assert isinstance(first, explanations.BehindHead)
    assert (first.head, first.ahead) == (head, Count(1))
    behind, gap = why(race, numbered[1])
    assert isinstance(behind, explanations.BehindHead)
    assert behind.ahead == Count(2)
    assert isinstance(gap, explanations.Gap)
    assert gap.missing == 2

    assert race.drain(worker) == [head, numbered[0]]
    assert [why(race, job_id) for job_id in left] == [[STRAY], [STRAY]]
    (gap,) = why(race, numbered[1])
    assert gap == explanations.Gap(key="k", position=5, missing=2, ahead=Count(0))
    assert worker.sweep() == []
    worker.commit()

    person = race.application()
    for job_id in left:
        person.act("cancel", job_id)
    late = [person.enqueue("k", position=n) for n in (2, 3, 4)]
    person.commit()
    assert race.drain(worker) == [*late, numbered[1]]

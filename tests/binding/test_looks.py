"""Every kind of session and connection, on every driver, looks and acts on many jobs alike."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from cyclone_sqla import JobFilter, JobNotFoundError
from tests.binding.doors import KINDS, Door, drivers
from tests.shop import Shop, settled

NOW = datetime.now(UTC)

EVERYTHING = JobFilter(
    state="pending",
    queue="default",
    kind="mail",
    sequence="s",
    tenant="t",
    created_before=NOW + timedelta(days=1),
    created_after=NOW - timedelta(days=1),
    dead_letter=False,
)


def test_every_target_looks_and_acts_on_many(shop: Shop, door: Door) -> None:
    door.run(lambda target: _a_round(shop, target))
    assert len(shop.jobs()) == 3


def test_a_look_works_the_twentieth_time_too(shop: Shop, driver: str) -> None:
    Door(shop.database, driver, KINDS[driver][0]).run(lambda target: _rounds(shop, target, 16))


@pytest.mark.parametrize("driver", drivers("psycopg", "psycopg2", "psycopg_async", "asyncpg"))
def test_a_look_works_with_a_generic_plan(shop: Shop, driver: str) -> None:
    async def story(target: Any) -> None:
        await settled(target.execute(text("SET plan_cache_mode = force_generic_plan")))
        await _rounds(shop, target, 2)

    Door(shop.database, driver, KINDS[driver][2]).run(story)


async def _rounds(shop: Shop, target: Any, count: int) -> None:
    for _ in range(count):
        await _a_round(shop, target)
    assert len(shop.jobs()) == count * 3


async def _a_round(shop: Shop, target: Any) -> None:
    sequenced = shop.mail.using(sequence="s", tenant="t")
    refs = [await settled(sequenced.enqueue(target, "anna")) for _ in range(3)]
    await _look(shop, target, refs[-1].id)
    await _act(shop, target, refs[0].id - 1)
    await settled(target.commit())


async def _look(shop: Shop, target: Any, job_id: int) -> None:
    cyclone = shop.cyclone
    explanation = await settled(cyclone.explain(target, job_id))
    assert (explanation.reason, explanation.job_id) == ("incoming", job_id)
    assert await settled(cyclone.history(target, job_id)) == []
    with pytest.raises(JobNotFoundError):
        await settled(cyclone.get(target, sequence="s", position=1))
    page = await settled(cyclone.jobs(target, EVERYTHING, newest_first=True, limit=2))
    assert [job.id for job in page] == [job_id, job_id - 1]
    page = await settled(cyclone.jobs(target, EVERYTHING, newest_first=True, after=job_id))
    assert page[0].id == job_id - 1
    assert (await settled(cyclone.queues(target)))[0].jobs["pending"].number == 3
    assert [line.key for line in await settled(cyclone.sequences(target))] == ["s"]
    assert await settled(cyclone.sequences(target, only_paused=True, after="a")) == []
    assert (await settled(cyclone.sequence(target, "s"))).head is None
    assert await settled(cyclone.halted_sequences(target)) == []
    assert (await settled(cyclone.stats(target))).pending["admission"].number == 3


async def _act(shop: Shop, target: Any, after: int) -> None:
    wanted = JobFilter(kind="mail")
    for verb in ("reschedule", "pause", "resume", "cancel", "replay", "skip", "cancel"):
        options = {"process_in": 5} if verb == "reschedule" else {}
        for preview in (True, False):
            act = getattr(shop.cyclone, f"{verb}_many")
            report = await settled(act(target, wanted, after=after, preview=preview, **options))
            assert len(report.done) == (0 if verb == "skip" else 3), verb

"""A worker's memory is flat, however many jobs it runs, and however they end."""

import gc
import logging

import pytest
import sqlalchemy as sa

from cyclone_sqla import Job, JobSpec
from cyclone_sqla.worker.recycling import resident_memory
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Site

ROUNDS = 40
JOBS = 5_000
"""Of a round; 200,000 in all."""

WARM_UP = 8
"""Rounds in which caches and pools fill."""

MARGIN = 24 << 20
"""Bytes by which memory may rise and fall: 125 a job would show."""


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_memory_is_flat_over_two_hundred_thousand_jobs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The records of 20,000 failures, which the test runner would keep.
    monkeypatch.setattr(logging.getLogger("cyclone_sqla"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("cyclone_sqla.worker"), "disabled", True)
    site = Site(database, hints=False)

    def work(text: str) -> str:
        if text.startswith("bad"):
            raise ValueError(text)
        return text

    site.action(work)
    seen: list[int] = []
    with site.worker(poll=0.05, keep_completed=0.0, keep_discarded=0.0, prune_dead_letters=1.0,
                     prune_interval=1.0):  # fmt: skip
        for round_ in range(ROUNDS):
            enqueue(site, round_)
            wait_until(lambda: not has_active(site), "all have ended", within=120)
            gc.collect()
            seen.append(resident_memory())
    grown = max(seen[WARM_UP:]) - seen[WARM_UP]
    assert grown < MARGIN, [size >> 20 for size in seen]


def enqueue(site: Site, round_: int) -> None:
    """One in ten fails, with a text and a payload of its own."""
    texts = [("bad" if n % 10 == 0 else "good") + f" {round_} {n} " * 20 for n in range(JOBS)]
    specs = [
        JobSpec(kind="work", arguments=f'{{"text": "{text}"}}', max_attempts=1) for text in texts
    ]
    with site.engine.begin() as connection:
        site.cyclone.enqueue_many(connection, specs)


def has_active(site: Site) -> bool:
    active = sa.select(Job.id).where(Job.finished_at.is_(None)).limit(1)
    with site.engine.connect() as connection:
        return connection.execute(active).first() is not None

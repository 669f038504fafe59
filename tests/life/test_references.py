"""References: the application's rows refer to jobs by a foreign key, and hold nothing up by it."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from cyclone_sqla import Job, operations
from cyclone_sqla.operations import Claiming
from cyclone_sqla.worker.maintenance import Pruner
from tests.databases import Database
from tests.life.hands import DONE, Hands
from tests.life.test_prune import left, pruner_of

on_postgresql = pytest.mark.postgresql


class Base(DeclarativeBase):
    """The application's own."""


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="")
    job_id: Mapped[int | None] = mapped_column(ForeignKey(Job.id, ondelete="SET NULL"), index=True)
    job: Mapped[Job | None] = relationship(Job)


@pytest.fixture(name="hands")
def _hands_with_orders(hands: Hands) -> Hands:
    Base.metadata.create_all(hands.engine)
    return hands


@pytest.fixture
def postgresql_hands(postgresql_database: Database) -> Iterator[Hands]:
    """Where several transactions write at the same time."""
    with closing(Hands(postgresql_database)) as hands:
        Base.metadata.create_all(hands.engine)
        yield hands


def ordered(hands: Hands, count: int = 1) -> list[int]:
    """Jobs that an order refers to each, in the transaction that enqueued them; their ids."""
    with Session(hands.engine) as session, session.begin():
        refs = [hands.cyclone.enqueue(session, "work", {}) for _ in range(count)]
        session.add_all([Order(job_id=ref.id) for ref in refs])
    return [ref.id for ref in refs]


def jobs_of_orders(hands: Hands) -> list[int | None]:
    with hands.engine.connect() as connection:
        return list(connection.scalars(sa.select(Order.job_id).order_by(Order.id)))


def prune_all(pruner: Pruner) -> None:
    while pruner.prune_batch():
        pass


def test_a_row_refers_to_the_job_of_its_own_transaction(hands: Hands) -> None:
    (job_id,) = ordered(hands)
    with Session(hands.engine) as session:
        order = session.scalars(sa.select(Order)).one()
        assert order.job is not None
        assert (order.job.id, order.job.state) == (job_id, "available")
        waiting = sa.select(Order).join(Order.job).where(Job.state == "available")
        assert session.scalars(waiting).all() == [order]


def test_a_row_of_a_transaction_that_is_rolled_back_leaves_no_job(hands: Hands) -> None:
    with Session(hands.engine) as session:
        ref = hands.cyclone.enqueue(session, "work", {})
        session.add(Order(job_id=ref.id))
        session.flush()
        session.rollback()
    assert (left(hands), jobs_of_orders(hands)) == ([], [])


def test_a_referenced_job_goes_through_its_whole_life(hands: Hands) -> None:
    ids = ordered(hands, 3)
    for _ in ids:
        assert hands.settle(hands.claim_one(), DONE)
    assert {hands.job(job_id).state for job_id in ids} == {"completed"}


def test_a_pruned_job_leaves_null_behind_it(hands: Hands) -> None:
    kept, pruned = ordered(hands, 2)
    for job in hands.claim():
        if job.id == pruned:
            hands.settle(job, DONE)
    hands.clock.advance(days=2)

    prune_all(pruner_of(hands))

    assert left(hands) == [kept]
    assert jobs_of_orders(hands) == [kept, None]


def test_many_pruned_jobs_leave_null_behind_them(hands: Hands) -> None:
    ids = ordered(hands, 20)
    hands.settle_all([(job, DONE) for job in hands.claim(20)])
    hands.clock.advance(days=2)

    prune_all(pruner_of(hands))

    assert (left(hands), jobs_of_orders(hands)) == ([], [None] * len(ids))


@on_postgresql
class TestBesideOpenTransactions:
    """What only a database with many writers can show."""

    def test_a_reference_that_is_not_committed_hides_no_job(self, postgresql_hands: Hands) -> None:
        hands = postgresql_hands
        ids = hands.enqueue_many(3)
        with Session(hands.engine) as session:
            session.add_all([Order(job_id=job_id) for job_id in ids])
            session.flush()  # each is now locked FOR KEY SHARE
            claimed = hands.claim(3)
            assert sorted(job.id for job in claimed) == ids
            assert sorted(hands.settle_all([(job, DONE) for job in claimed]).states) == ids
            session.commit()
        assert jobs_of_orders(hands) == ids

    def test_a_reference_waits_for_no_claim(self, postgresql_hands: Hands) -> None:
        hands = postgresql_hands
        (job_id,) = hands.enqueue_many(1)
        wanted = Claiming({"default": 1}, ["work"], "w", timedelta(minutes=1))
        with hands.transaction() as claiming:
            assert operations.claim(claiming, hands.dialect, wanted)
            with Session(hands.engine) as session:
                session.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
                session.add(Order(job_id=job_id))
                session.commit()
        assert jobs_of_orders(hands) == [job_id]

    def test_a_job_that_is_being_referred_to_is_pruned_later(self, postgresql_hands: Hands) -> None:
        hands = postgresql_hands
        referred, other = hands.enqueue_many(2)
        hands.settle_all([(job, DONE) for job in hands.claim(2)])
        hands.clock.advance(days=2)
        with Session(hands.engine) as session:
            session.add(Order(job_id=referred))
            session.flush()
            prune_all(pruner_of(hands))
            assert left(hands) == [referred]
            session.commit()
        prune_all(pruner_of(hands))
        assert (left(hands), jobs_of_orders(hands)) == ([], [None])
        assert other not in left(hands)

    def test_pruning_steps_over_a_job_whose_row_is_locked(
        self, postgresql_hands: Hands, caplog: pytest.LogCaptureFixture
    ) -> None:
        hands = postgresql_hands
        locked, *others = ordered(hands, 4)
        hands.settle_all([(job, DONE) for job in hands.claim(4)])
        hands.clock.advance(days=2)
        with Session(hands.engine) as session:
            session.execute(sa.update(Order).where(Order.job_id == locked).values(name="mine"))
            prune_all(pruner_of(hands))  # it would have to write this row
            assert left(hands) == [locked]
            assert not caplog.records, "nobody has to do anything about it"
            session.commit()
        prune_all(pruner_of(hands))
        assert (left(hands), jobs_of_orders(hands)) == ([], [None] * (1 + len(others)))

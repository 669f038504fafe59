"""The shop of `cyclone-sqla demo`: an application like any other that uses the queue.

It takes orders, and a job charges each of them to the customer's account, one order of an account
after the other. As services do, it reads from its environment where its database is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from time import monotonic

import sqlalchemy as sa
from sqlalchemy import Engine, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, JobSpec, begin_before_savepoints
from cyclone_sqla.cli.options import DATABASE_URL
from cyclone_sqla.urls import parsed, worker_url

QUEUE = "ledger"

cyclone = Cyclone()


@cache
def engine() -> Engine:
    """The shop's engine, made when it is first needed; its tables are in the queue's schema."""
    made = sa.create_engine(worker_url(parsed(os.environ[DATABASE_URL])))
    if made.dialect.name == "sqlite":
        begin_before_savepoints(made)
    if cyclone.schema is None:
        return made
    return made.execution_options(schema_translate_map={None: cyclone.schema})


cyclone.database = engine


class Base(DeclarativeBase):
    """The shop's own tables."""


class Account(Base):
    """A customer's account; amounts are in cents."""

    __tablename__ = "demo_account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Order(Base):
    """An order of a customer."""

    __tablename__ = "demo_order"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    amount: Mapped[int]


class Entry(Base):
    """One line of the ledger, and when the run that wrote it began and ended."""

    __tablename__ = "demo_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    # Not unique: that an order has one entry is the queue's promise, so that it can be checked.
    order_number: Mapped[int] = mapped_column(ForeignKey(Order.number))
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    amount: Mapped[int]
    began: Mapped[float]
    ended: Mapped[float]


def place_orders(session: Session, orders: Sequence[Order]) -> None:
    """Orders and the jobs that charge them: with the commit all of them are there, or none."""
    session.add_all(orders)
    cyclone.enqueue_many(session, [_job_for(order) for order in orders])


def _job_for(order: Order) -> JobSpec:
    in_turn = charge.using(sequence=f"account-{order.account_id}")
    return in_turn.job(order.number, order.account_id, order.amount)


ADD_TO_BALANCE = (
    sa.update(Account)
    .where(Account.id == sa.bindparam("account"))
    .values(balance=Account.balance + sa.bindparam("cents"))
)


@cyclone.action(queue=QUEUE)
def charge(ctx: Context, order_number: int, account_id: int, amount: int) -> None:
    """Enter an order in the ledger.

    What is written through the session commits together with the job's completion, or not at all:
    it happens once, though the job may run again after its worker died.
    """
    began = monotonic()
    ctx.session.execute(ADD_TO_BALANCE, {"account": account_id, "cents": amount})
    entry = Entry(order_number=order_number, account_id=account_id, amount=amount)
    entry.began, entry.ended = began, monotonic()
    ctx.session.add(entry)

"""The shop of `cyclone-sqla demo`: an application like any other that uses the queue.

It takes orders, and a job charges each of them to the customer's account. As services do, it reads
from its environment where its database is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import sqlalchemy as sa
from sqlalchemy import Engine, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Cyclone, begin_before_savepoints
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


class Base(DeclarativeBase):
    """The shop's own tables."""


class Account(Base):
    """A customer's account; amounts are in cents."""

    __tablename__ = "demo_account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Order(Base):
    """An order, and whether it has been charged to the account."""

    __tablename__ = "demo_order"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    amount: Mapped[int]
    is_charged: Mapped[bool] = mapped_column(default=False)


class Entry(Base):
    """One line of the ledger."""

    __tablename__ = "demo_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    # Not unique: that an order has one entry is left to the action, so that it can be checked.
    order_number: Mapped[int] = mapped_column(ForeignKey(Order.number))
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    amount: Mapped[int]


def place_orders(session: Session, orders: Sequence[Order]) -> None:
    """Orders and the jobs that charge them: with the commit all of them are there, or none."""
    session.add_all(orders)
    jobs = [charge.job(order.number, order.account_id, order.amount) for order in orders]
    cyclone.enqueue_many(session, jobs)


MARK_CHARGED = (
    sa.update(Order)
    .where(Order.number == sa.bindparam("order_number"), ~Order.is_charged)
    .values(is_charged=True)
)

ADD_TO_BALANCE = (
    sa.update(Account)
    .where(Account.id == sa.bindparam("account_id"))
    .values(balance=Account.balance + sa.bindparam("amount"))
)


@cyclone.action(queue=QUEUE)
def charge(order_number: int, account_id: int, amount: int) -> None:
    """Enter an order in the ledger.

    A job may run again, for example after its worker died before it could say that the job was
    done. So the first thing written is a mark, and a run that finds it changes nothing.
    """
    entry = {"order_number": order_number, "account_id": account_id, "amount": amount}
    with engine().begin() as connection:
        if connection.execute(MARK_CHARGED, entry).rowcount == 1:
            connection.execute(sa.insert(Entry), entry)
            connection.execute(ADD_TO_BALANCE, entry)

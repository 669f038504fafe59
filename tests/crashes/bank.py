"""Two accounts and transfers between them: what the jobs of a crashing fleet move."""

import time

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone


class Base(DeclarativeBase):
    """The bank's own."""


class Account(Base):
    """An account, with its balance in cents."""

    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Applied(Base):
    """One row for each time that a transfer was applied."""

    __tablename__ = "applied"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int]


def register(cyclone: Cyclone, engine: sa.Engine) -> None:
    """The two ways to apply a transfer: in the run's own transaction, and in another one."""

    @cyclone.action(backoff=0.05)
    def transfer(ctx: Context, debit: int, credit: int, amount: int) -> None:
        apply(ctx.session, ctx.job.id, debit, credit, amount)

    @cyclone.action(backoff=0.05)
    def transfer_apart(ctx: Context, debit: int, credit: int, amount: int) -> None:
        with Session(engine) as session, session.begin():
            apply(session, ctx.job.id, debit, credit, amount)
        time.sleep(0.02)


def apply(session: Session, job_id: int, debit: int, credit: int, amount: int) -> None:
    """Move the money, by reading and writing both balances."""
    locked = sa.select(Account).order_by(Account.id).with_for_update()
    accounts = {account.id: account for account in session.scalars(locked)}
    accounts[debit].balance -= amount
    accounts[credit].balance += amount
    session.add(Applied(job_id=job_id))
    session.flush()

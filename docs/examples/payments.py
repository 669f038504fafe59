"""Payments: each goes through its four steps, one payment of an account after the other."""

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from cyclone_sqla import Context, Cyclone

cyclone = Cyclone()


class Base(DeclarativeBase):
    """The application's own tables."""


class Account(Base):
    """Money of a customer, in cents."""

    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Payment(Base):
    """Money on its way: `new`, then `refused`, or `held` and at last `paid`."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(sa.ForeignKey(Account.id))
    account: Mapped[Account] = relationship()
    payee: Mapped[str]
    cents: Mapped[int]
    status: Mapped[str] = mapped_column(default="new")


def pay(session: Session, account: Account, payee: str, cents: int) -> Payment:
    """Store a payment and enqueue its steps; those of other accounts run beside them.

    If the transfer fails for good, nothing more is paid from the account until a person has looked.
    """
    payment = Payment(account=account, payee=payee, cents=cents)
    session.add(payment)
    session.flush()
    of_account = f"account:{account.id}"
    steps = [
        validate.using(sequence=of_account).job(payment),
        hold.using(sequence=of_account).job(payment),
        transfer.using(sequence=of_account, on_failure="halt").job(payment),
        send_receipt.using(sequence=of_account).job(payment),
    ]
    cyclone.enqueue_many(session, steps)
    return payment


@cyclone.action
def validate(payment: Payment) -> None:
    """Refuse what the account can't pay; nobody else takes money from it meanwhile."""
    if payment.account.balance < payment.cents:
        payment.status = "refused"


@cyclone.action
def hold(payment: Payment) -> None:
    """Take the money. It commits together with this job's end, so it is taken once."""
    if payment.status == "new":
        payment.account.balance -= payment.cents
        payment.status = "held"


@cyclone.action(max_attempts=5)
def transfer(ctx: Context, payment: Payment) -> None:
    """Have the bank pay. A second run of this job is the same order to the bank."""
    if payment.status == "held":
        order_transfer(payment.payee, payment.cents, idempotency_key=f"transfer-{ctx.job.id}")
        payment.status = "paid"


@cyclone.action(queue="mail")
def send_receipt(payment: Payment) -> str:
    """Tell the customer; the text is kept as the result of the job."""
    return f"{payment.cents / 100:.2f} to {payment.payee}: {payment.status}"


def order_transfer(payee: str, cents: int, *, idempotency_key: str) -> None:
    """Stands for the bank, which does what it was ordered to once for each key."""

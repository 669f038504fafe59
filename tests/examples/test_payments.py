"""Payments of accounts."""

import pytest
from sqlalchemy import Engine

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import payments
from docs.examples.payments import Account, cyclone, pay, send_receipt, transfer
from tests.databases import on_both

pytestmark = on_both


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    payments.Base.metadata.create_all(cyclone_database)


@pytest.fixture
def account(cyclone_env: CycloneEnv) -> Account:
    """An account with 100 cents."""
    account = Account(balance=100)
    cyclone_env.session.add(account)
    cyclone_env.session.commit()
    return account


class Bank:
    """What takes the place of the bank."""

    def __init__(self) -> None:
        self.orders: dict[str, int] = {}
        self.calls = 0
        self.is_down = False

    def order_transfer(self, payee: str, cents: int, *, idempotency_key: str) -> None:
        self.calls += 1
        if self.is_down and payee == "baker":
            raise ConnectionError("the bank is down")
        self.orders.setdefault(idempotency_key, cents)


@pytest.fixture(autouse=True)
def bank(monkeypatch: pytest.MonkeyPatch) -> Bank:
    bank = Bank()
    monkeypatch.setattr(payments, "order_transfer", bank.order_transfer)
    return bank


def test_an_account_is_never_overdrawn_by_payments_that_follow_each_other(
    cyclone_env: CycloneEnv, account: Account, bank: Bank
) -> None:
    with cyclone_env.session.begin():
        made = [pay(cyclone_env.session, account, "baker", cents) for cents in (70, 60, 30)]
    assert [payment.status for payment in made] == ["paid", "refused", "paid"]
    assert (account.balance, list(bank.orders.values())) == (0, [70, 30])
    receipts = [job.result for job in cyclone_env.jobs(send_receipt)]
    assert receipts == [f'"{text}"' for text in RECEIPTS]


RECEIPTS = ("0.70 to baker: paid", "0.60 to baker: refused", "0.30 to baker: paid")


@pytest.mark.cyclone(auto_start=False)
def test_a_worker_that_dies_after_the_transfer_makes_no_second_one(
    cyclone_env: CycloneEnv, account: Account, bank: Bank
) -> None:
    payment = pay(cyclone_env.session, account, "baker", 70)
    (job,) = cyclone_env.jobs(transfer)
    cyclone_env.crash(at="before_settle", job=job)
    cyclone_env.run_until_idle()
    assert (payment.status, bank.calls) == ("held", 1)

    cyclone_env.advance(minutes=2)
    cyclone_env.run_until_idle()
    assert (payment.status, account.balance) == ("paid", 30)
    assert (bank.calls, list(bank.orders.values())) == (2, [70])


@pytest.mark.cyclone(raise_errors=False)
def test_a_transfer_that_fails_for_good_stops_its_account_and_no_other(
    cyclone_env: CycloneEnv, account: Account, bank: Bank
) -> None:
    bank.is_down = True
    other = Account(balance=100)
    with cyclone_env.session.begin():
        cyclone_env.session.add(other)
        stopped = [pay(cyclone_env.session, account, payee, 10) for payee in ("baker", "butcher")]
        paid = pay(cyclone_env.session, other, "butcher", 10)
    for _ in range(5):
        cyclone_env.advance(minutes=5)
    assert [payment.status for payment in stopped] == ["held", "new"]
    assert paid.status == "paid"

    bank.is_down = False
    (halted,) = cyclone.halted_sequences(cyclone_env.session)
    cyclone.replay(cyclone_env.session, halted.head, by="anna")
    cyclone_env.session.commit()
    assert [payment.status for payment in stopped] == ["paid", "paid"]

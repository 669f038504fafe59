"""What must be true when the demo's jobs are over: the database against the demo's own books."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import sqlalchemy as sa
from sqlalchemy.orm import QueryableAttribute, Session

from cyclone_sqla.cli.demo_shop import Account, Entry, Order, cyclone
from cyclone_sqla.cli.demo_traffic import Books, Sale
from cyclone_sqla.lifecycle import State
from cyclone_sqla.models import Job

SHOWN = 3
"""How many of the orders with a trouble are named."""


@dataclass(frozen=True)
class Check:
    """One thing that must be true, what was found, and what is wrong with it (empty: nothing)."""

    name: str
    found: str
    trouble: str = ""


def checks(session: Session, books: Books) -> list[Check]:
    """All of them, in the order of a job's life."""
    jobs = session.scalars(sa.select(cyclone.job_class)).all()
    job_orders = [_order_of(job) for job in jobs]
    orders = {sale.number: sale for sale in _sales(session, Order.number, Order)}
    entries = _sales(session, Entry.order_number, Entry)
    return [
        _orders_are_there(books, orders),
        _orders_have_jobs(books, job_orders),
        _nothing_rolled_back(books, [*orders, *job_orders, *(entry.number for entry in entries)]),
        _jobs_completed(jobs),
        _ledger_is_right(books, entries),
        _accounts_are_in_order(session),
        _no_two_at_a_time(session),
        _balances_are_right(session, books),
    ]


def _sales(
    session: Session, number: QueryableAttribute[int], of: type[Order | Entry]
) -> list[Sale]:
    rows = session.execute(sa.select(number, of.account_id, of.amount))
    return [Sale(*row) for row in rows]


def _order_of(job: Job) -> int:
    number: int = json.loads(job.arguments)["order_number"]
    return number


def _orders_are_there(books: Books, orders: Mapping[int, Sale]) -> Check:
    wrong = [number for number, sale in books.committed.items() if orders.get(number) != sale]
    return Check(
        "every committed order is there",
        f"{len(orders):,} orders",
        _named(wrong, "missing or changed"),
    )


def _orders_have_jobs(books: Books, job_orders: Collection[int]) -> Check:
    wrong = _not_once(books, job_orders)
    return Check("each has its one job", f"{len(job_orders):,} jobs", _named(wrong, "not one job"))


def _nothing_rolled_back(books: Books, found: Iterable[int]) -> Check:
    wrong = sorted(books.rolled_back.intersection(found))
    return Check(
        "nothing is left of what was rolled back",
        f"{len(wrong):,} of {len(books.rolled_back):,}",
        _named(wrong, "rolled back, and there"),
    )


def _jobs_completed(jobs: Collection[Job]) -> Check:
    over = [job for job in jobs if job.state == State.COMPLETED]
    wrong = [_order_of(job) for job in jobs if job.state != State.COMPLETED]
    errors = {job.last_error for job in jobs if job.state != State.COMPLETED and job.last_error}
    runs = sum(job.attempt for job in jobs)
    return Check(
        "every job is completed",
        f"{len(over):,} jobs in {runs:,} runs",
        "; ".join([_named(wrong, "job not completed"), *sorted(errors)[:1]]) if wrong else "",
    )


def _ledger_is_right(books: Books, entries: Collection[Sale]) -> Check:
    wrong = _not_once(books, [entry.number for entry in entries])
    wrong += [entry.number for entry in entries if books.committed.get(entry.number) != entry]
    return Check(
        "each order is in the ledger exactly once",
        f"{len(entries):,} entries",
        _named(sorted(set(wrong)), "not one right entry"),
    )


def _accounts_are_in_order(session: Session) -> Check:
    """Orders get rising numbers, and the ledger's lines rising ids."""
    lines = _lines(session)
    wrong = [
        after.order_number
        for before, after in pairwise(lines)
        if before.account_id == after.account_id and before.order_number > after.order_number
    ]
    return Check(
        "each account's orders were charged in their order",
        f"{len({line.account_id for line in lines})} accounts",
        _named(wrong, "charged out of turn"),
    )


def _no_two_at_a_time(session: Session) -> Check:
    wrong = [
        after.order_number
        for before, after in pairwise(_lines(session))
        if before.account_id == after.account_id and after.began < before.ended
    ]
    return Check(
        "no two of an account were charged at a time",
        f"{len(wrong)} overlaps",
        _named(wrong, "begun before the one before it had ended"),
    )


def _lines(session: Session) -> Sequence[Entry]:
    return session.scalars(sa.select(Entry).order_by(Entry.account_id, Entry.id)).all()


def _balances_are_right(session: Session, books: Books) -> Check:
    due: Counter[int] = Counter()
    for sale in books.committed.values():
        due[sale.account_id] += sale.amount
    accounts = session.scalars(sa.select(Account)).all()
    wrong = [account.id for account in accounts if account.balance != due[account.id]]
    total = sum(account.balance for account in accounts) / 100
    return Check(
        "the balances are right",
        f"{len(accounts)} accounts, {total:,.2f} in all",
        _named(wrong, "wrong balance", of="account"),
    )


def _not_once(books: Books, numbers: Iterable[int]) -> list[int]:
    """Committed orders that don't occur once."""
    times = Counter(numbers)
    return [number for number in books.committed if times[number] != 1]


def _named(wrong: Collection[int], trouble: str, of: str = "order") -> str:
    """``3 orders (1, 4, 7): not one job``; empty if there are none."""
    if not wrong:
        return ""
    some = ", ".join(str(number) for number in list(wrong)[:SHOWN])
    more = ", …" if len(wrong) > SHOWN else ""
    plural = "" if len(wrong) == 1 else "s"
    return f"{len(wrong):,} {of}{plural} ({some}{more}): {trouble}"

"""What happens in the demo's shop: transactions with orders, and some that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sqlalchemy.orm import Session

from cyclone_sqla.cli.demo_shop import Account, Base, Order, engine, place_orders

ACCOUNTS = range(1, 11)

AT_ONCE = 20
"""Orders of one transaction."""

IN_SAVEPOINT = 5
"""Orders of a savepoint that is rolled back."""


class Sale(NamedTuple):
    """An order, as the demo remembers it."""

    number: int
    account_id: int
    amount: int


@dataclass
class Books:
    """What was done, kept apart from the database, to compare it with."""

    committed: dict[int, Sale] = field(default_factory=dict[int, Sale])
    rolled_back: set[int] = field(default_factory=set[int])
    commits: int = 0
    rollbacks: int = 0
    savepoints: int = 0
    """Rolled back, in transactions that were committed."""

    def new_sales(self, how_many: int) -> list[Sale]:
        """Sales with numbers never used before, rolled back or not."""
        first = len(self.committed) + len(self.rolled_back) + 1
        return [_sale(number) for number in range(first, first + how_many)]

    def commit(self, sales: list[Sale]) -> None:
        """A transaction with these orders was committed."""
        self.commits += 1
        self.committed |= {sale.number: sale for sale in sales}

    def roll_back(self, sales: list[Sale]) -> None:
        """Nothing of these orders may be found."""
        self.rolled_back |= {sale.number for sale in sales}


def _sale(number: int) -> Sale:
    return Sale(number, ACCOUNTS[number % len(ACCOUNTS)], 100 + number * 37 % 9_000)


class ChangedMind(Exception):
    """The customer won't have it after all: what an application raises to roll back."""


def open_shop() -> None:
    """Create the shop's tables, with empty accounts."""
    Base.metadata.create_all(engine())
    with Session(engine()) as session, session.begin():
        session.add_all(Account(id=number) for number in ACCOUNTS)


def take_orders(wanted: int, books: Books) -> Iterator[int]:
    """Place orders until ``wanted`` are committed; after each transaction, how many are.

    One transaction in four is rolled back as a whole, and one loses a savepoint.
    """
    for turn in count():
        missing = wanted - len(books.committed)
        if missing == 0:
            return
        sales = books.new_sales(min(AT_ONCE, missing))
        if turn % 4 == 0:
            _roll_back(books, sales)
        else:
            _commit(books, sales, loses_savepoint=turn % 4 == 1)
        yield len(books.committed)


def _roll_back(books: Books, sales: list[Sale]) -> None:
    with suppress(ChangedMind), Session(engine()) as session, session.begin():
        _place(session, sales)
        raise ChangedMind
    books.rollbacks += 1
    books.roll_back(sales)


def _commit(books: Books, sales: list[Sale], *, loses_savepoint: bool) -> None:
    with Session(engine()) as session, session.begin():
        _place(session, sales)
        books.commit(sales)
        if loses_savepoint:
            _lose_savepoint(session, books)


def _lose_savepoint(session: Session, books: Books) -> None:
    sales = books.new_sales(IN_SAVEPOINT)
    with suppress(ChangedMind), session.begin_nested():
        _place(session, sales)
        raise ChangedMind
    books.savepoints += 1
    books.roll_back(sales)


def _place(session: Session, sales: list[Sale]) -> None:
    place_orders(session, [Order(**sale._asdict()) for sale in sales])

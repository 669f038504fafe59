"""Mapped classes of every sort, to be passed to actions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Column, Dialect, Engine, ForeignKey, Integer, String, Table, Uuid, event
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.types import CHAR, TypeDecorator


@dataclass(frozen=True)
class Number:
    """A key of the application's own type."""

    country: str
    digits: int


class NumberType(TypeDecorator[Number]):
    """Such a key in a text column."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Number | None, dialect: Dialect) -> str | None:
        """As it is stored."""
        return None if value is None else f"{value.country}-{value.digits}"

    def process_result_value(self, value: str | None, dialect: Dialect) -> Number | None:
        """As it is used."""
        if value is None:
            return None
        country, _, digits = value.partition("-")
        return Number(country, int(digits))


class Lower(TypeDecorator[str]):
    """Text in lower case."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """As it is stored."""
        return None if value is None else value.lower()


class Rows(DeclarativeBase):
    """The application's own; its tables are named so that they can lie beside those of others."""


class Account(Rows):
    """One whole number, given by the database."""

    __tablename__ = "row_account"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="")
    limits: Mapped[list[Limit]] = relationship(lazy="joined")


class Limit(Rows):
    """A row of an account, loaded with it."""

    __tablename__ = "row_account_limit"
    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))


class Price(Rows):
    """A key of two columns."""

    __tablename__ = "row_price"
    product: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)


class Document(Rows):
    """A UUID, made by the client at the flush."""

    __tablename__ = "row_document"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class Blob(Rows):
    """Bytes that are no text."""

    __tablename__ = "row_blob"
    digest: Mapped[bytes] = mapped_column(primary_key=True)


class Line(Rows):
    """A key of a type of the application's own."""

    __tablename__ = "row_line"
    number: Mapped[Number] = mapped_column(NumberType, primary_key=True)


class Tag(Rows):
    """A key whose type is told by what its column decorates; another column has its name."""

    __tablename__ = "row_tag"
    word = mapped_column("name", Lower, primary_key=True)


class Code(Rows):
    """A key that the database pads with spaces, if it is PostgreSQL."""

    __tablename__ = "row_code"
    code: Mapped[str] = mapped_column(CHAR(8), primary_key=True)


class Employee(Rows):
    """The base of a family with tables of their own."""

    __tablename__ = "row_employee"
    __mapper_args__ = {"polymorphic_on": "type", "polymorphic_identity": "employee"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str]


class Manager(Employee):
    """Has a table of its own, and a key under another name."""

    __tablename__ = "row_manager"
    __mapper_args__ = {"polymorphic_identity": "manager"}  # noqa: RUF012
    manager_id: Mapped[int] = mapped_column(ForeignKey(Employee.id), primary_key=True)
    budget: Mapped[int]


class Intern(Employee):
    """Shares the table of its base."""

    __mapper_args__ = {"polymorphic_identity": "intern"}  # noqa: RUF012
    school: Mapped[str | None]


class Parcel(Rows):
    """The base of a class with keys of its own."""

    __tablename__ = "row_parcel"
    id: Mapped[int] = mapped_column(primary_key=True)


class Letter(Parcel):
    """Concrete inheritance: the same key may be in both tables."""

    __tablename__ = "row_letter"
    __mapper_args__ = {"concrete": True}  # noqa: RUF012
    id: Mapped[int] = mapped_column(primary_key=True)


class Ticket(MappedAsDataclass, Rows):
    """A dataclass as well."""

    __tablename__ = "row_ticket"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    title: Mapped[str]


@dataclass
class Invoice:
    """Mapped later, or never."""

    number: int
    sent: bool = False


def map_later(base: type[Any], name: str) -> Table:
    """Map a class with a number as its key, imperatively."""
    table = Table(
        name,
        Rows.metadata,
        Column("number", Integer, primary_key=True),
        Column("batch", Uuid),
        extend_existing=True,
    )
    registry(metadata=Rows.metadata).map_imperatively(base, table)
    return table


NEW: dict[str, Callable[[], Any]] = {
    "integer": lambda: Account(name="a"),
    "composite": lambda: Price(product="tea \N{SNOWMAN}", day=date(2024, 2, 29)),
    "uuid": Document,
    "bytes": lambda: Blob(digest=b"\x00\xff"),
    "custom": lambda: Line(number=Number("de", 7)),
    "decorated": lambda: Tag(word="red"),
    "padded": lambda: Code(code="abc"),
    "base": Employee,
    "joined": lambda: Manager(budget=3),
    "single": lambda: Intern(school="s"),
    "concrete": Letter,
    "dataclass": lambda: Ticket(title="t"),
}
"""An instance of every sort, ready to be inserted."""


@contextmanager
def selects_from(base: type[Rows]) -> Iterator[list[str]]:
    """What is sent to read a class's table, by any engine, while the block runs."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("SELECT") and f"FROM {base.__tablename__}" in statement:
            sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)

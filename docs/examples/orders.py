"""Orders of a shop: stock, invoice and parcel in that order, and express orders before others."""

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, Retry

cyclone = Cyclone(on_failure="halt")


class Base(DeclarativeBase):
    """The application's own tables."""


class Item(Base):
    """What is sold, and how many there are."""

    __tablename__ = "item"

    sku: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    """Some pieces of an item, and what has been done about them."""

    __tablename__ = "item_order"

    number: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(sa.ForeignKey(Item.sku))
    pieces: Mapped[int]
    is_express: Mapped[bool] = mapped_column(default=False)
    invoice: Mapped[str | None]
    parcel: Mapped[str | None]


def place_order(session: Session, order: Order) -> None:
    """Store an order together with all that has to follow."""
    session.add(order)
    session.flush()
    sequence, priority = f"order:{order.number}", -10 if order.is_express else 0
    steps = (take_from_stock, make_invoice, ship)
    jobs = [step.using(sequence=sequence, priority=priority).job(order) for step in steps]
    cyclone.enqueue_many(session, jobs)


@cyclone.action(max_attempts=3)
def take_from_stock(ctx: Context, order: Order) -> None:
    """Wait for a delivery if there is not enough; on the third day the order is halted."""
    enough = sa.and_(Item.sku == order.sku, Item.stock >= order.pieces)
    taken = sa.update(Item).where(enough).values(stock=Item.stock - order.pieces)
    if ctx.session.execute(taken.returning(Item.sku)).first() is None:
        raise Retry(f"there are no {order.pieces} {order.sku}", in_=24 * 3600)


@cyclone.action
def make_invoice(order: Order) -> None:
    """Only what could be taken is invoiced."""
    order.invoice = f"invoice {order.number}"


@cyclone.action(queue="warehouse")
def ship(order: Order) -> None:
    """Only what is invoiced is shipped. The queue may have workers of its own."""
    order.parcel = f"{order.pieces} {order.sku}"


def restock(session: Session, sku: str, pieces: int, by: str) -> None:
    """Add to the stock, and try again every order that was halted for want of something."""
    session.get_one(Item, sku, with_for_update=True).stock += pieces
    for halted in cyclone.halted_sequences(session):
        if halted.kind == take_from_stock.kind:
            cyclone.replay(session, halted.head, by=by)

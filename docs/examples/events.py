"""A stream of events for each entity: they arrive in any order, and are applied in theirs."""

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, DuplicatePositionError

cyclone = Cyclone(on_failure="halt")


class Base(DeclarativeBase):
    """The application's own tables."""


class Cart(Base):
    """What the events of a cart come to, as of the latest that was applied."""

    __tablename__ = "cart"

    id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)
    pieces: Mapped[int] = mapped_column(default=0)


def receive(session: Session, cart: str, version: int, change: int) -> bool:
    """Take an event as it comes in. False: it has come before, as senders repeat themselves."""
    in_order = apply.using(sequence=f"cart:{cart}", position=version)
    try:
        in_order.enqueue(session, cart, version, change)
    except DuplicatePositionError:
        return False
    return True


@cyclone.action
def apply(ctx: Context, cart: str, version: int, change: int) -> None:
    """Bring the cart from one version to the next. No two versions meet here, none is left out."""
    found = ctx.session.get(Cart, cart) or Cart(id=cart, version=0, pieces=0)
    if found.pieces + change < 0:
        raise ValueError(f"there are no {-change} pieces in {cart}")
    found.version, found.pieces = version, found.pieces + change
    ctx.session.add(found)


def missing_version(session: Session, cart: str) -> int | None:
    """The version that the stream waits for, if one has not come in."""
    line = cyclone.sequence(session, f"cart:{cart}")
    if line.head is not None or not line.waiting.number:
        return None
    return (line.released_through or 0) + 1

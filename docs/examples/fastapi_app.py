"""A shop behind FastAPI: an order and the jobs that follow from it are one transaction.

uvicorn fastapi_app:app
cyclone-sqla work --app fastapi_app:cyclone

Its own tables are made by its migrations, the queue's by `cyclone-sqla migrate`.
"""

import logging
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cyclone_sqla import Context, Cyclone, DuplicateError, JobNotFoundError

log = logging.getLogger(__name__)

engine = create_async_engine(os.environ.get("SHOP_DATABASE", "sqlite+aiosqlite:///shop.db"))
Sessions = async_sessionmaker(engine, expire_on_commit=False)

app = FastAPI()
cyclone = Cyclone(database=Sessions)


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """What somebody ordered; the client chooses the reference."""

    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str] = mapped_column(unique=True)
    email: Mapped[str]
    is_paid: Mapped[bool] = mapped_column(default=False)


# ---- what happens later --------------------------------------------------------------------------


@cyclone.action(queue="mail", max_attempts=5)
def confirm(order: Order) -> None:
    """Tell the customer that the order has come in."""
    send_mail(order.email, f"Thank you! Your order is {order.reference}.")


@cyclone.action(queue="mail")
def remind(order: Order) -> None:
    """Ask for the money, unless it has come meanwhile: the row is as it is now."""
    if not order.is_paid:
        send_mail(order.email, f"Your order {order.reference} is not paid yet.")


@cyclone.action(queue="invoices")
def make_invoice(ctx: Context, order: Order) -> None:
    """Make an invoice, and have it sent: the mail's job commits together with this one's end."""
    text = f"Invoice for {order.reference}"
    send_invoice.enqueue(ctx.session, order, text)


@cyclone.action(queue="mail")
def send_invoice(order: Order, text: str) -> None:
    """Send what was made."""
    send_mail(order.email, text)


def send_mail(to: str, text: str) -> None:
    """Stands for the mail server."""
    log.info("to %s: %s", to, text)


# ---- what happens at once ------------------------------------------------------------------------


async def get_session() -> AsyncIterator[AsyncSession]:
    """A session for one request; what its endpoint does not commit is rolled back."""
    async with Sessions() as session:
        yield session


DatabaseSession = Annotated[AsyncSession, Depends(get_session)]


class NewOrder(BaseModel):
    """What a client sends."""

    reference: str
    email: str


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder, session: DatabaseSession) -> int:
    """Store an order, and the jobs that follow from it: all of them, or nothing."""
    order = Order(reference=new.reference, email=new.email)
    session.add(order)
    try:
        await confirm.enqueue(session, order)
        await remind.using(process_in=timedelta(days=14)).enqueue(session, order)
        await session.commit()
    except IntegrityError as error:
        raise HTTPException(409, f"there is an order {new.reference}") from error
    return order.id


@app.post("/orders/{order_id}/invoice", status_code=202)
async def request_invoice(order_id: int, session: DatabaseSession) -> int:
    """Have an invoice made, unless somebody is at it: the number of the job."""
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    try:
        job = await make_invoice.using(unique=f"invoice:{order_id}").enqueue(session, order)
    except DuplicateError as duplicate:
        raise HTTPException(409, {"job": duplicate.job_id}) from duplicate
    await session.commit()
    return job.id


@app.get("/jobs/{job_id}")
async def show_job(job_id: int, session: DatabaseSession) -> dict[str, str | None]:
    """How a job is getting on."""
    try:
        job = await cyclone.get(session, job_id)
    except JobNotFoundError as error:
        raise HTTPException(404) from error
    return {"state": job.state, "error": job.last_error}

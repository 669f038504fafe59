"""Orders of a shop."""

import pytest
from sqlalchemy import Engine

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import orders
from docs.examples.orders import Item, Order, cyclone, place_order, restock, ship
from tests.databases import on_both

pytestmark = on_both


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    orders.Base.metadata.create_all(cyclone_database)


@pytest.fixture(autouse=True)
def tea(cyclone_env: CycloneEnv) -> Item:
    """Five of them are there."""
    tea = Item(sku="tea", stock=5)
    cyclone_env.session.add(tea)
    cyclone_env.session.commit()
    return tea


def place(env: CycloneEnv, *placed: Order) -> None:
    """In one transaction."""
    with env.session.begin():
        for order in placed:
            place_order(env.session, order)


def test_an_order_is_taken_from_stock_invoiced_and_shipped(
    cyclone_env: CycloneEnv, tea: Item
) -> None:
    order = Order(sku="tea", pieces=2)
    place(cyclone_env, order)
    assert (order.parcel, tea.stock) == ("2 tea", 3)
    assert order.invoice == f"invoice {order.number}"


def test_express_orders_come_first_though_they_were_placed_last(cyclone_env: CycloneEnv) -> None:
    slow, fast = Order(sku="tea", pieces=4), Order(sku="tea", pieces=3, is_express=True)
    place(cyclone_env, slow, fast)
    assert (slow.parcel, fast.parcel) == (None, "3 tea")


@pytest.mark.cyclone(raise_errors=False)
def test_an_order_waits_for_a_delivery_and_nothing_of_it_is_done_before(
    cyclone_env: CycloneEnv, tea: Item
) -> None:
    order = Order(sku="tea", pieces=6)
    place(cyclone_env, order)
    assert (order.invoice, tea.stock) == (None, 5)
    tea.stock = 6
    cyclone_env.session.commit()
    cyclone_env.advance(hours=24)
    assert (order.parcel, tea.stock) == ("6 tea", 0)


@pytest.mark.cyclone(raise_errors=False)
def test_a_delivery_lets_go_on_what_was_halted(cyclone_env: CycloneEnv, tea: Item) -> None:
    order, other = Order(sku="tea", pieces=6), Order(sku="tea", pieces=5)
    place(cyclone_env, order, other)
    cyclone_env.advance(hours=24)
    cyclone_env.advance(hours=24)
    assert (order.parcel, other.parcel) == (None, "5 tea")
    (halted,) = cyclone.halted_sequences(cyclone_env.session)
    assert "there are no 6 tea" in halted.why

    restock(cyclone_env.session, "tea", 7, by="anna")
    cyclone_env.session.commit()
    assert (order.parcel, tea.stock) == ("6 tea", 1)
    cyclone_env.assert_completed(ship, order=order)

"""Instances of mapped classes on their way to JSON: by their keys, or refused before any SQL."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, NewType
from uuid import UUID

import pytest
import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.orm import Session, make_transient_to_detached
from sqlalchemy.pool import StaticPool
from typing_extensions import TypeAliasType

from cyclone_sqla import Action, Cyclone, PayloadError, RegistrationError
from cyclone_sqla.entities import Draft, Reference
from tests.rows import (
    NEW,
    Account,
    Blob,
    Employee,
    Intern,
    Invoice,
    Letter,
    Line,
    Manager,
    Number,
    Parcel,
    Rows,
    Tag,
    Ticket,
    map_later,
)
from tests.shop import statements_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

Accounts = TypeAliasType("Accounts", list[Account])
Payer = NewType("Payer", Account)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    Rows.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def action_of(fn: Callable[..., Any], **options: Any) -> Action[..., Any]:
    return Cyclone().action(kind="work", **options)(fn)


def pay(account: Account, amount: Decimal = Decimal(0)) -> None:
    """Every value of these types arrives unchanged."""


def note(account: Account, remark: object, more: list[Account | None] | None = None) -> None:
    """What is encoded has to be compared with what was given."""


BOTH = [action_of(pay), action_of(note)]


def texts(session: Session, row: Any, *more: Any) -> list[str]:
    """The JSON text of the row as an argument, whether it has to be compared or not."""
    return [BOTH[0].encode((row,), {}, session), BOTH[1].encode((row, None), {}, session)]


def refusals(session: Session, row: Any) -> list[str]:
    """Why both refuse it; nothing is sent to the database."""
    found: list[str] = []
    with statements_of(session.get_bind()) as sent:
        for args in ((row,), (row, None)):
            with pytest.raises(PayloadError) as caught:
                BOTH[len(args) - 1].encode(args, {}, session)
            assert caught.value.path == "account"
            found.append(caught.value.reason)
    assert sent == []
    return found


# ---- states of an instance -----------------------------------------------------------------------


def test_the_key_of_a_stored_row_is_known_without_any_sql(session: Session) -> None:
    account = Account(name="a")
    session.add(account)
    session.commit()  # which expires it
    with statements_of(session.get_bind()) as sent:
        assert texts(session, account) == ['{"account":1}', '{"account":1,"remark":null}']
        session.expunge(account)
        assert BOTH[0].job(account).arguments == '{"account":1}'
    assert sent == []
    assert sa.inspect(account).expired_attributes >= {"name"}


def test_a_row_of_another_session_travels_by_its_key(session: Session, engine: Engine) -> None:
    with Session(engine, expire_on_commit=False) as other, other.begin():
        account = Account()
        other.add(account)
        other.flush()
        assert texts(session, account) == ['{"account":1}', '{"account":1,"remark":null}']


def test_a_row_that_was_put_together_by_its_key_is_a_stored_one(session: Session) -> None:
    account = Account(id=42)
    make_transient_to_detached(account)
    assert BOTH[0].encode((account,), {}) == '{"account":42}'


def test_an_instance_without_a_key_is_refused_before_any_sql(session: Session) -> None:
    for reason in refusals(session, Account()):
        assert reason.startswith("this Account is in no session and was never stored")
        assert "add it to the session" in reason


def test_an_instance_that_another_session_has_to_insert_is_refused(
    session: Session, engine: Engine
) -> None:
    account = Account()
    with Session(engine) as other:
        other.add(account)
        for reason in refusals(session, account):
            assert reason.startswith("this Account is not inserted yet")
            assert "call flush() on its session" in reason


def test_a_job_without_a_session_takes_no_pending_instance(session: Session) -> None:
    account = Account()
    session.add(account)
    with pytest.raises(PayloadError, match=r"account: this Account is not inserted yet.*flush\(\)"):
        BOTH[0].job(account)
    session.flush()
    assert BOTH[0].job(account).arguments == '{"account":1}'


@pytest.mark.parametrize("how", ["marked", "flushed", "committed"])
def test_a_deleted_row_is_refused(session: Session, how: str) -> None:
    account = Account()
    session.add(account)
    session.commit()
    session.delete(account)
    if how != "marked":
        session.flush()
    if how == "committed":
        session.commit()
    for reason in refusals(session, account):
        assert reason.startswith("this Account is deleted")


def test_a_row_whose_insert_was_rolled_back_is_refused(session: Session) -> None:
    account = Account()
    session.add(account)
    session.flush()
    session.rollback()
    assert "was never stored" in refusals(session, account)[0]


def test_something_else_than_an_instance_is_refused_with_its_path(session: Session) -> None:
    assert "must be an instance of Account, not of int" in refusals(session, 42)[0]
    assert "must be an instance of Account, not of NoneType" in refusals(session, None)[0]
    assert (
        "must be an instance of Account, not of Ticket" in refusals(session, Ticket(title="t"))[0]
    )
    account = Account(id=1)
    make_transient_to_detached(account)
    with pytest.raises(PayloadError) as caught:
        BOTH[1].job(account, None, more=[account, None, Account()])
    assert caught.value.path == "more[2]"


# ---- pending instances ---------------------------------------------------------------------------


def test_a_pending_instance_leaves_its_place_open_until_the_flush(session: Session) -> None:
    rows = [Account(), Account()]
    session.add_all(rows)
    more = [rows[1], None, rows[0]]
    text = BOTH[1].encode((rows[0], {"a": ['"', "b"]}), {"more": more}, session)
    more.clear()
    session.flush()
    assert isinstance(text, Draft)
    assert json.loads(text.completed()) == {
        "account": rows[0].id,
        "remark": {"a": ['"', "b"]},
        "more": [rows[1].id, None, rows[0].id],
    }


@pytest.mark.parametrize("sort", NEW)
def test_a_pending_instance_of_every_sort_gets_the_key_of_its_row(
    session: Session, sort: str
) -> None:
    row = NEW[sort]()

    def work(row: Any, also: object) -> None: ...

    work.__annotations__ |= {"row": type(row)}
    action = action_of(work)
    session.add(row)
    text = action.encode((row, None), {}, session)
    session.flush()
    assert isinstance(text, Draft)
    assert text.completed() == action.job(row, None).arguments
    arrived = action.decode(text.completed())[1]["row"]
    assert isinstance(arrived, Reference)
    assert arrived.key == sa.inspect(row).identity


def test_an_instance_that_the_flush_did_not_insert_is_refused(session: Session) -> None:
    account = Account()
    session.add(account)
    text = BOTH[0].encode((account,), {}, session)
    session.expunge(account)
    session.flush()
    assert isinstance(text, Draft)
    with pytest.raises(PayloadError, match="work: account: this Account is in no session"):
        text.completed()


def test_a_key_that_would_not_come_back_is_refused_after_the_flush(session: Session) -> None:
    def work(tags: list[Tag]) -> None: ...

    tags = [Tag(word="red"), Tag(word="a\0b")]
    session.add_all(tags)
    text = action_of(work).encode((tags,), {}, session)
    session.flush()
    assert isinstance(text, Draft)
    with pytest.raises(PayloadError, match=r"its primary key .*NUL") as caught:
        text.completed()
    assert caught.value.path == "tags[1]"


def test_a_refused_argument_flushes_nothing(session: Session) -> None:
    account = Account()
    session.add(account)
    with statements_of(session.get_bind()) as sent, pytest.raises(PayloadError, match="remark"):
        BOTH[1].encode((account, {"a": float("nan")}), {}, session)
    assert sent == []
    assert account in session.new


def test_to_find_what_is_wrong_no_attribute_of_a_row_is_loaded(session: Session) -> None:
    def work(ticket: Ticket, remark: object) -> None: ...

    ticket = Ticket(title="t")
    session.add(ticket)
    session.commit()  # which expires it
    action = action_of(work)
    with statements_of(session.get_bind()) as sent:
        for remark in (float("nan"), "a\0b", (1,)):
            with pytest.raises(PayloadError, match="remark"):
                action.job(ticket, remark)
    assert sent == []


# ---- keys ----------------------------------------------------------------------------------------


def stored(row: Any) -> Any:
    """The row as if it had been loaded."""
    make_transient_to_detached(row)
    return row


@pytest.mark.parametrize(
    ("base", "row", "key"),
    [
        (Account, lambda: Account(id=2**62), str(2**62)),
        (Line, lambda: Line(number=Number("de", 7)), '{"country":"de","digits":7}'),
        (Tag, lambda: Tag(word="red"), '"red"'),
        (Employee, lambda: Manager(id=3, manager_id=3), "3"),
        (Manager, lambda: Manager(id=3, manager_id=3), "3"),
        (Employee, lambda: Intern(id=3), "3"),
        (Letter, lambda: Letter(id=4), "4"),
        (Blob, lambda: Blob(digest=b"\0\xff"), '"AP8="'),
    ],
)
def test_a_key_travels_as_an_argument_of_its_type_would(
    base: type[Any], row: Callable[[], Any], key: str
) -> None:
    def work(row: Any) -> None: ...

    work.__annotations__ |= {"row": base}
    assert action_of(work).job(stored(row())).arguments == f'{{"row":{key}}}'


def test_a_key_that_would_not_come_back_is_refused(session: Session) -> None:
    def work(tag: Tag) -> None: ...

    action = action_of(work)
    for key, reason in [("a\0b", "NUL"), ("a\ud800b", "surrogate"), (7, "valid string")]:
        with pytest.raises(PayloadError, match=reason) as caught:
            action.job(stored(Tag(word=key)))
        assert caught.value.path == "tag"


def test_an_instance_with_keys_of_its_own_is_refused_for_its_base() -> None:
    def work(parcel: Parcel) -> None: ...

    with pytest.raises(PayloadError, match="annotate the parameter with Letter"):
        action_of(work).job(stored(Letter(id=1)))


def test_names_of_types_are_seen_through(session: Session) -> None:
    def work(payer: Payer, accounts: Accounts) -> None: ...

    account = stored(Account(id=1))
    assert action_of(work).job(account, [account]).arguments == '{"payer":1,"accounts":[1]}'


def test_by_name_a_key_or_an_instance_is_given(session: Session) -> None:
    account = stored(Account(id=1))
    assert BOTH[0].encode_raw({"account": 1, "amount": "1.5"}) == '{"account":1,"amount":"1.5"}'
    given = {"account": account, "amount": Decimal("1.5")}
    assert BOTH[0].encode_raw(given) == '{"account":1,"amount":"1.5"}'
    with pytest.raises(PayloadError, match="account: Input should be a valid integer"):
        BOTH[0].encode_raw({"account": "1"})
    with pytest.raises(PayloadError, match="account: this Account is in no session"):
        BOTH[0].encode_raw({"account": Account()})


# ---- registration --------------------------------------------------------------------------------


def test_a_class_may_be_mapped_after_its_action_was_decorated() -> None:
    def work(invoice: Invoice, plain: Late) -> None: ...

    class Late:
        number: int

    action = action_of(work)
    tables = [map_later(Invoice, "invoice"), map_later(Late, "late")]
    late = stored(Late(number=2))  # type: ignore[call-arg]
    assert action.job(stored(Invoice(1)), late).arguments == '{"invoice":1,"plain":2}'
    for table in tables:
        Rows.metadata.remove(table)


def test_a_union_of_a_mapped_class_is_refused_where_it_is_decorated() -> None:
    def work(account: Account | int) -> None: ...

    with pytest.raises(RegistrationError, match=r"parameter 'account': Account \| int: a mapped"):
        action_of(work)


def test_a_class_that_is_never_mapped_is_refused_with_a_hint() -> None:
    class Plain: ...

    def work(plain: Plain) -> None: ...

    with pytest.raises(RegistrationError, match="if it is to be mapped, map it before"):
        action_of(work).check()


def test_none_for_missing_rows_needs_a_place_for_none() -> None:
    def one(account: Account) -> None: ...

    def many(accounts: list[Account] | None) -> None: ...

    def optional(account: Account | None, accounts: list[Account | None]) -> None: ...

    for fn in (one, many):
        with pytest.raises(RegistrationError, match=r"write `Account \| None` there"):
            action_of(fn, missing="none").check()
    action_of(optional, missing="none").check()


def test_an_option_about_missing_rows_has_to_mean_something() -> None:
    def work(n: int) -> None: ...

    with pytest.raises(RegistrationError, match="missing: no parameter takes a mapped class"):
        action_of(work, missing="none").check()
    with pytest.raises(RegistrationError, match="missing: must be 'discard' or 'none'"):
        action_of(pay, missing="ignore")


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Sequence[Account], list),
        (deque[Account], deque),
        (tuple[Account, ...], tuple),
        (dict[str, list[Account | None]], lambda rows: {"a": [*rows, None]}),
        (Mapping[UUID, Account], lambda rows: {UUID(int=1): rows[0]}),
        (OrderedDict[str, Account], lambda rows: OrderedDict(b=rows[0], a=rows[1])),
        (list[list[Account]] | None, lambda rows: [rows, []]),
        (list[Account] | dict[str, Account] | int, lambda rows: {"a": rows[0]}),
        (Annotated[Account, Field(description="who pays")], lambda rows: rows[0]),
    ],
    ids=lambda value: "" if isinstance(value, FunctionType | type) else str(value),
)
def test_containers_arrive_as_they_were_given(
    session: Session, annotation: Any, value: Callable[[list[Account]], Any]
) -> None:
    def work(given: Any) -> None: ...

    work.__annotations__ |= {"given": annotation}
    rows = [Account(), Account()]
    session.add_all(rows)
    session.flush()
    action = action_of(work)
    text = action.job(value(rows)).arguments
    assert action.load(text, session)[1]["given"] == value(rows)

"""The newsletter behind Flask-SQLAlchemy, tested through its own endpoints."""

from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, select
from sqlalchemy.orm import scoped_session, sessionmaker

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import flask_app
from docs.examples.flask_app import Subscriber, db, export, greet
from tests.databases import on_both

pytestmark = on_both


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return flask_app.cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    db.Model.metadata.create_all(cyclone_database)


@pytest.fixture
def client(cyclone_env: CycloneEnv, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlaskClient]:
    """A client of the application, whose sessions join the transaction of the test."""
    sessions = sessionmaker(cyclone_env.connection, join_transaction_mode="create_savepoint")
    monkeypatch.setattr(db, "session", scoped_session(sessions))
    yield flask_app.app.test_client()
    db.session.remove()


@pytest.fixture(autouse=True)
def mails(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom the application has written to."""
    sent: list[str] = []
    monkeypatch.setattr(flask_app, "send_mail", lambda to, _text: sent.append(to))
    return sent


def sign_up(client: FlaskClient, email: str = "anna@example.org") -> int:
    return int(client.post("/subscribers", data={"email": email}).json["id"])


def test_who_signs_up_is_greeted(
    client: FlaskClient, cyclone_env: CycloneEnv, mails: list[str]
) -> None:
    sign_up(client)
    assert mails == ["anna@example.org"]
    assert cyclone_env.session.scalars(select(Subscriber.greeted)).one() == 1


@pytest.mark.cyclone(raise_errors=False)
def test_a_mail_server_that_is_down_is_tried_again(
    client: FlaskClient,
    cyclone_env: CycloneEnv,
    mails: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as down:
        down.delattr(flask_app, "send_mail")
        sign_up(client)
    assert cyclone_env.session.scalars(select(Subscriber.greeted)).one() == 0
    cyclone_env.advance(minutes=5)
    assert mails == ["anna@example.org"]
    assert cyclone_env.assert_completed(greet).attempt == 2


@pytest.mark.cyclone(auto_start=False)
def test_who_asks_twice_for_an_export_is_given_the_same_job(
    client: FlaskClient, cyclone_env: CycloneEnv
) -> None:
    number = sign_up(client)
    first, again = [client.post(f"/subscribers/{number}/export").json for _ in range(2)]
    assert (first["is_new"], again["is_new"]) == (True, False)
    assert first["job"] == again["job"] == cyclone_env.assert_enqueued(export).id

    cyclone_env.run_until_idle()

    shown = client.get(f"/exports/{first['job']}").json
    assert shown == {"state": "completed", "result": {"email": "anna@example.org"}}


def test_who_is_not_a_subscriber_has_no_export(client: FlaskClient) -> None:
    assert client.post("/subscribers/1/export").status_code == 404

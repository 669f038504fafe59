"""Onboarding of users."""

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import onboarding
from docs.examples.onboarding import (
    UndeliverableError,
    User,
    Workspace,
    cyclone,
    provision_workspace,
    send_again,
    send_verification,
    sign_up,
    track,
)


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    onboarding.Base.metadata.create_all(cyclone_database)


@pytest.fixture(autouse=True)
def mails(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the application has written."""
    sent: list[str] = []

    def send(to: str, text: str) -> None:
        if "nowhere" in to:
            raise UndeliverableError(to)
        sent.append(text)

    monkeypatch.setattr(onboarding, "send_mail", send)
    return sent


def signed_up(env: CycloneEnv, email: str = "anna@example.org") -> User:
    with env.session.begin():
        return sign_up(env.session, email)


@pytest.mark.cyclone(raise_errors=False)
def test_a_user_is_written_to_then_given_a_workspace_then_counted(
    cyclone_env: CycloneEnv, mails: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as down:
        down.delattr(onboarding, "send_mail")
        signed_up(cyclone_env)
    for later in (provision_workspace, track):
        cyclone_env.assert_enqueued(later)
    cyclone_env.advance(minutes=5)
    assert mails == ["Is this you?"]
    names = cyclone_env.session.scalars(select(Workspace.name)).all()
    assert names == ["anna@example.org's workspace"]
    cyclone_env.assert_completed(track)


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_day_later_who_is_not_verified_is_reminded(
    cyclone_env: CycloneEnv, mails: list[str], is_verified: bool
) -> None:
    signed_up(cyclone_env).is_verified = is_verified
    cyclone_env.session.commit()
    cyclone_env.advance(days=1)
    assert mails[1:] == ([] if is_verified else ["Is this still you?"])


def test_a_user_who_has_gone_is_not_reminded(cyclone_env: CycloneEnv, mails: list[str]) -> None:
    user = signed_up(cyclone_env)
    for row in (*cyclone_env.session.scalars(select(Workspace)), user):
        cyclone_env.session.delete(row)
        cyclone_env.session.flush()
    cyclone_env.session.commit()
    cyclone_env.advance(days=1)
    assert mails == ["Is this you?"]


@pytest.mark.cyclone(raise_errors=False)
def test_an_address_that_does_not_exist_holds_up_nothing(cyclone_env: CycloneEnv) -> None:
    signed_up(cyclone_env, "nowhere@example.org")
    assert cyclone_env.assert_discarded(send_verification).attempt == 1
    cyclone_env.assert_completed(provision_workspace)


@pytest.mark.cyclone(auto_start=False)
def test_impatient_clicks_send_one_mail(cyclone_env: CycloneEnv, mails: list[str]) -> None:
    user = signed_up(cyclone_env)
    cyclone_env.run_until_idle()
    first, again = [send_again(cyclone_env.session, user) for _ in range(2)]
    assert (first.created, again.created, again.id) == (True, False, first.id)
    cyclone_env.run_until_idle()
    assert mails == ["Is this you?"] * 2
    assert send_again(cyclone_env.session, user).created


def test_an_address_that_is_taken_leaves_no_job(cyclone_env: CycloneEnv, mails: list[str]) -> None:
    signed_up(cyclone_env)
    with pytest.raises(IntegrityError):
        signed_up(cyclone_env)
    assert len(cyclone_env.jobs(send_verification)) == len(mails) == 1

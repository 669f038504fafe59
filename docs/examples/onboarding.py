"""Onboarding: what happens in order once somebody has signed up, and a reminder a day later."""

import logging
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, JobRef

log = logging.getLogger(__name__)

cyclone = Cyclone()


class Base(DeclarativeBase):
    """The application's own tables."""


class User(Base):
    """Somebody who has signed up."""

    __tablename__ = "app_user"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    is_verified: Mapped[bool] = mapped_column(default=False)


class Workspace(Base):
    """Where a user works; each has one to begin with."""

    __tablename__ = "workspace"

    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(sa.ForeignKey(User.id))
    name: Mapped[str]


class UndeliverableError(Exception):
    """There is no such address."""


def sign_up(session: Session, email: str) -> User:
    """Create a user. If the address is taken, the IntegrityError is yours, and no job is left."""
    user = User(email=email)
    session.add(user)
    session.flush()
    for step in (send_verification, provision_workspace, track):
        step.using(sequence=f"user:{user.id}").enqueue(session, user)
    # Not in the sequence: there it would hold up what comes behind it for a day.
    remind.using(process_in=timedelta(days=1)).enqueue(session, user)
    return user


def send_again(session: Session, user: User) -> JobRef:
    """Send another mail, unless one is on its way: impatient clicks make no second one."""
    once = send_verification.using(unique=f"verification:{user.id}", on_duplicate="return")
    return once.enqueue(session, user)


@cyclone.action(queue="mail", max_attempts=8, discard_on=(UndeliverableError,))
def send_verification(user: User) -> None:
    """An address that does not exist is not tried again, and holds up nothing."""
    send_mail(user.email, "Is this you?")


@cyclone.action
def provision_workspace(ctx: Context, user: User) -> None:
    """Make the first workspace: with the commit of this job, or not at all."""
    ctx.session.add(Workspace(owner_id=user.id, name=f"{user.email}'s workspace"))


@cyclone.action(max_attempts=3)
def track(user: User) -> None:
    """Tell the analysts, who can do without."""
    log.info("user %d has signed up", user.id)


@cyclone.action(queue="mail", missing="none")
def remind(user: User | None) -> None:
    """A day later the user may have been verified, or have gone."""
    if user is not None and not user.is_verified:
        send_mail(user.email, "Is this still you?")


def send_mail(to: str, text: str) -> None:
    """Stands for the mail server."""
    log.info("to %s: %s", to, text)

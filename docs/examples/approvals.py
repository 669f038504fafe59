"""Approval of documents: the stages of a document come one after the other, and a "no" stops it."""

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, Discard, Snooze

STAGES = ("team", "legal", "board")

cyclone = Cyclone(on_failure="halt")


class Base(DeclarativeBase):
    """The application's own tables."""


class Document(Base):
    """What has to be approved."""

    __tablename__ = "document"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]
    is_published: Mapped[bool] = mapped_column(default=False)


class Answer(Base):
    """What the people of a stage have said of a document: their latest word."""

    __tablename__ = "document_answer"

    document_id: Mapped[int] = mapped_column(sa.ForeignKey(Document.id), primary_key=True)
    stage: Mapped[str] = mapped_column(primary_key=True)
    is_yes: Mapped[bool]


def submit(session: Session, document: Document) -> None:
    """Send a document on its way: a job for each stage, and one that publishes it."""
    session.flush()
    stages = [approve.using(sequence=line(document)).job(document, stage) for stage in STAGES]
    publication = publish.using(sequence=line(document)).job(document)
    cyclone.enqueue_many(session, [*stages, publication])


@cyclone.action
def approve(ctx: Context, document: Document, stage: str) -> None:
    """Wait for the answer of one stage; those behind it have not been asked yet."""
    answer = ctx.session.get(Answer, (document.id, stage))
    if answer is None:
        raise Snooze("nobody has answered", in_=timedelta(hours=1))
    if not answer.is_yes:
        raise Discard(f"{stage} said no")


@cyclone.action
def publish(document: Document) -> None:
    """The end of the line: everybody has said yes."""
    document.is_published = True


def resubmit(session: Session, document: Document, by: str) -> None:
    """Ask again the stage that has said no, of a document that was changed."""
    head = cyclone.sequence(session, line(document)).head
    if head is not None:
        cyclone.replay(session, head.id, by=by)


def line(document: Document) -> str:
    """The sequence of a document: others go their own way meanwhile."""
    return f"document:{document.id}"

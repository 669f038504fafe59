"""Approval of documents."""

import pytest
from sqlalchemy import Engine

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import approvals
from docs.examples.approvals import Answer, Document, cyclone, line, publish, resubmit, submit


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    approvals.Base.metadata.create_all(cyclone_database)


@pytest.fixture
def document(cyclone_env: CycloneEnv) -> Document:
    """A document that is on its way."""
    with cyclone_env.session.begin():
        document = Document(title="budget")
        cyclone_env.session.add(document)
        submit(cyclone_env.session, document)
    return document


def answer(env: CycloneEnv, document: Document, stage: str, is_yes: bool = True) -> None:
    """A stage says its word, and what waits for it looks again."""
    env.session.merge(Answer(document_id=document.id, stage=stage, is_yes=is_yes))
    env.session.commit()
    env.advance(hours=1)


def test_a_document_is_published_when_every_stage_has_said_yes(
    cyclone_env: CycloneEnv, document: Document
) -> None:
    answer(cyclone_env, document, "board")
    answer(cyclone_env, document, "team")
    assert not document.is_published, "legal was passed over"
    answer(cyclone_env, document, "legal")
    assert document.is_published
    cyclone_env.assert_completed(publish, document=document)


def test_a_no_stops_this_document_and_no_other(cyclone_env: CycloneEnv, document: Document) -> None:
    other = Document(title="party")
    with cyclone_env.session.begin():
        cyclone_env.session.add(other)
        submit(cyclone_env.session, other)
    answer(cyclone_env, document, "team", is_yes=False)
    for stage in approvals.STAGES:
        answer(cyclone_env, other, stage)
    assert (document.is_published, other.is_published) == (False, True)
    (halted,) = cyclone.halted_sequences(cyclone_env.session)
    assert halted.key == line(document)
    assert "team said no" in halted.why


def test_a_document_that_was_changed_goes_on_where_it_was_stopped(
    cyclone_env: CycloneEnv, document: Document
) -> None:
    answer(cyclone_env, document, "team")
    answer(cyclone_env, document, "legal", is_yes=False)
    answer(cyclone_env, document, "board")

    answer(cyclone_env, document, "legal")
    assert not document.is_published, "nobody has asked again"
    resubmit(cyclone_env.session, document, by="anna")
    cyclone_env.session.commit()
    assert document.is_published

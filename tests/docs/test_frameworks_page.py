"""What the page about frameworks shows of Litestar, as an application that is called."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from cyclone_sqla import Job
from tests.docs.test_snippets import DOCS, blocks


@pytest.mark.filterwarnings("ignore:The declarative_mixin decorator")
def test_the_application_of_litestar_commits_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litestar.testing import TestClient  # imports what warns of itself

    monkeypatch.chdir(tmp_path)
    page = DOCS / "how-to" / "frameworks.md"
    shown = ModuleType("shown")
    monkeypatch.setitem(sys.modules, "shown", shown)  # Litestar looks up annotations there
    for block in (blocks(page, "python")[0], *blocks(page, "py")):
        exec(compile(block, page.name, "exec", dont_inherit=True), vars(shown))
    with TestClient(shown.app) as client:
        assert client.post("/orders").json() == 1
    engine = create_engine("sqlite:///app.db")
    with Session(engine) as session:
        assert session.scalars(select(Job.kind)).all() == ["send"]
    engine.dispose()
    shown.engine.dispose()

"""The revisions of the page "Keep one migration history" do what it says, in a real project."""

from pathlib import Path

import pytest

from cyclone_sqla import migrations, schema_version
from tests.databases import Database
from tests.docs.test_snippets import DOCS, blocks
from tests.migrations.moved_head import NEXT, move_head
from tests.migrations.projects import Project

FIRST, NEWER, ADOPTING, OLDER_ALEMBIC = blocks(DOCS / "how-to" / "one-history.md", "python")


@pytest.fixture
def project(sqlite_path: Database, tmp_path: Path) -> Project:
    """An application without tables."""
    return Project(tmp_path, sqlite_path)


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Database:
    """A file that doesn't exist yet."""
    return Database(f"sqlite:///{tmp_path / 'app.db'}")


def write(project: Project, revision: str, text: str, after: str | None = None) -> None:
    identifiers = f"revision, down_revision = {revision!r}, {after!r}\n\n\n"
    versions = project.directory / "migrations" / "versions"
    (versions / f"{revision}.py").write_text(identifiers + text)


def current(database: Database) -> str | None:
    return migrations.check_database(database.url).current


def test_the_first_revision_goes_there_and_back(project: Project, sqlite_path: Database) -> None:
    write(project, "queue", FIRST)
    project.upgrade()
    assert current(sqlite_path) == "0001"
    assert "DROP TABLE cyclone_job" in project.downgrade_script("queue:base")
    project.downgrade("base")
    assert current(sqlite_path) is None


def test_the_revision_for_newer_tables_goes_there_and_back(
    project: Project, sqlite_path: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = schema_version.HEAD
    write(project, "queue", FIRST.replace("0001", head))
    write(project, "newer", NEWER.replace("0001", head).replace("0002", NEXT), after="queue")
    move_head(monkeypatch, tmp_path)
    project.upgrade()
    assert current(sqlite_path) == NEXT
    project.downgrade("queue")
    assert current(sqlite_path) == head


def test_the_revision_that_adopts_takes_over(project: Project, sqlite_path: Database) -> None:
    migrations.migrate_database(sqlite_path.url)
    write(project, "queue", f"from alembic import op\n\n\n{ADOPTING}")
    project.upgrade()
    found = migrations.check_database(sqlite_path.url).installed
    assert found is not None
    assert found.by_application


def test_the_options_for_an_older_alembic_fit_into_env_py(
    project: Project, sqlite_path: Database
) -> None:
    migrations.migrate_database(sqlite_path.url)
    project.set_options("**options", imports=OLDER_ALEMBIC)
    project.autogenerate("the shop")
    project.upgrade()
    assert project.differences() == []

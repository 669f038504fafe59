"""The application's own Alembic leaves our tables alone, without a word of them in its env.py."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SAWarning

from cyclone_sqla import alembic_plugin, migrations
from cyclone_sqla.alembic_plugin import OURS, include_name, include_object
from cyclone_sqla.models import tables_in
from cyclone_sqla.schema_version import VERSION_TABLE
from tests.databases import Database
from tests.migrations.projects import MODELS, ORDER, Project, body_of

SCHEMA = "queue"

WITHOUT_THE_PLUGIN = (
    'autogenerate_plugins=["alembic.autogenerate.*", "~alembic.autogenerate.cyclone"]'
)
HELPERS = "include_name=include_name", "include_object=include_object"
IMPORT_HELPERS = "from cyclone_sqla.alembic_plugin import include_name, include_object"


OURS_TOO = """
from cyclone_sqla.models import Base as Ours

for table in Ours.metadata.sorted_tables:
    table.to_metadata(Base.metadata)
"""


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    """A project at its head, beside our tables in the same schema."""
    project = Project(tmp_path, database)
    project.autogenerate("the shop")
    project.upgrade()
    return project


def test_autogenerate_writes_nothing_of_ours(project: Project) -> None:
    script = project.autogenerate("nothing")
    assert body_of(script, "upgrade") == body_of(script, "downgrade") == ["pass"]


def test_the_first_revision_holds_the_applications_tables_alone(
    database: Database, tmp_path: Path
) -> None:
    script = Project(tmp_path, database).autogenerate("the shop")
    created = [line for line in body_of(script, "upgrade") if line.startswith("op.create_table")]
    assert [line.split("'")[1] for line in created] == ["customer", "orders"]
    assert "cyclone" not in script.replace("['cyclone_job.id'], ", "")
    assert "['cyclone_job.id'], ondelete='SET NULL'" in script


def test_the_command_starts_with_the_plugin(tmp_path: Path, sqlite_database: Database) -> None:
    version = Project(tmp_path, sqlite_database).alembic("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("alembic ")


def test_the_command_agrees(project: Project) -> None:
    check = project.alembic("check")
    assert check.returncode == 0, check.stderr
    assert "No new upgrade operations detected" in check.stdout


def test_a_model_that_is_dropped_is_all_that_is_proposed(project: Project) -> None:
    project.write_models(MODELS)
    (_, index), (_, table) = project.differences()
    assert (index.name, table.name) == ("ix_orders_job_id", "orders")
    script = project.autogenerate("no orders")
    assert [line.partition("(")[0] for line in body_of(script, "upgrade")] == [
        "op.drop_index",
        "op.drop_table",
    ]


def test_a_foreign_key_to_jobs_is_seen_when_it_comes_and_goes(project: Project) -> None:
    key = 'ForeignKey(cyclone.job_class.id, ondelete="SET NULL")'
    project.write_models(MODELS, ORDER.replace(key, "cyclone.job_class.id.type"))
    (difference,) = project.differences()
    assert difference[0] == "remove_fk"


def test_our_tables_are_left_alone_in_every_schema(
    postgresql_database: Database, tmp_path: Path
) -> None:
    migrations.migrate_database(postgresql_database.url, schema=SCHEMA)
    with postgresql_database.engine().begin() as connection:
        connection.execute(text(f"CREATE TABLE {SCHEMA}.stray (id integer)"))
    project = Project(tmp_path, postgresql_database, SCHEMA)
    project.set_options("include_schemas=True")
    script = project.autogenerate("the shop")
    assert f"['{SCHEMA}.cyclone_job.id'], ondelete='SET NULL'" in script
    dropped = [line for line in body_of(script, "upgrade") if line.startswith("op.drop")]
    assert dropped == [f"op.drop_table('stray', schema='{SCHEMA}')"]
    project.upgrade()
    assert project.differences() == []


def test_our_tables_in_the_applications_metadata_are_left_alone_too(project: Project) -> None:
    project.write_models(MODELS, ORDER, OURS_TOO)
    assert project.differences() == []


def test_without_the_plugin_our_tables_would_be_dropped(project: Project) -> None:
    project.set_options(WITHOUT_THE_PLUGIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # SQLite can't reflect all of our indexes
        found = project.differences()
    dropped = {thing.name for kind, thing, *_ in found if kind == "remove_table"}
    assert dropped >= {"cyclone_job", "cyclone_history", VERSION_TABLE}


def test_the_helpers_do_the_same_where_alembic_knows_no_plugins(project: Project) -> None:
    project.set_options(WITHOUT_THE_PLUGIN, *HELPERS, imports=IMPORT_HELPERS)
    assert project.differences() == []
    project.write_models(ORDER.join(MODELS.split("class Customer")[:1]) + ORDER)
    kinds = {kind for kind, *_ in project.differences()}
    assert kinds == {"remove_table", "remove_index"}


def test_the_applications_own_filters_still_count(project: Project) -> None:
    project.write_models(MODELS)
    project.set_options('include_name=lambda name, *_: name != "orders"')
    assert project.differences() == []


@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_the_helpers_know_all_that_is_ours(schema: str | None) -> None:
    tables = tables_in(schema)
    for table in tables.of("sqlite"):
        assert table.name in OURS
        for item in (table, *table.columns, *table.indexes, *table.constraints):
            assert not include_object(item, item.name, type(item).__name__.lower(), True, None)
        assert not include_name(table.name, "table", {"schema_name": schema})
        parent = {"schema_name": schema, "table_name": table.name}
        assert not include_name("id", "column", parent)
    assert not include_name(VERSION_TABLE, "table", {"schema_name": schema})


def test_the_helpers_leave_the_applications_to_it() -> None:
    assert include_name("cyclone_rides", "table", {"schema_name": None})
    assert include_name("ix_rides", "index", {"schema_name": None, "table_name": "cyclone_rides"})
    assert include_name(None, "schema", {})
    assert include_name("queue", "schema", {})


@pytest.mark.parametrize("first", ["alembic_plugin", "alembic_operations", "migrations"])
def test_it_is_loaded_whatever_is_imported_first(first: str) -> None:
    """Alembic loads it in the middle of its own import, which each of these begins."""
    code = f"import cyclone_sqla.{first}; from alembic import op; op.cyclone_upgrade"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_alembic_may_iterate_over_the_plugin_or_take_it_as_it_is() -> None:
    assert isinstance(alembic_plugin, ModuleType)
    assert list(alembic_plugin) == [sys.modules["cyclone_sqla.alembic_plugin"]]

"""The tables in the application's own Alembic history: there and back, online and as a script."""

from datetime import timedelta
from pathlib import Path

import pytest
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.errors import SchemaError
from cyclone_sqla.schema_version import Installed
from tests.databases import Database
from tests.migrations.catalogs import Catalog, catalog, engine_with_schema
from tests.migrations.moved_head import NEXT, move_head
from tests.migrations.projects import MODELS, ORDER, Project, body_of
from tests.migrations.scripts import run_script

SCHEMA = "queue"
HEAD = schema_version.HEAD


class History:
    """A project whose first revision makes our tables."""

    def __init__(self, directory: Path, database: Database, schema: str | None) -> None:
        self.database, self.schema = database, schema
        self.engine = engine_with_schema(database, SCHEMA)
        self.project = Project(directory, database, schema)
        self.project.write_models(MODELS)
        self.argument = "" if schema is None else f", schema={schema!r}"
        self.write_queue(HEAD)

    def write_queue(self, revision: str, more: str = "") -> None:
        self.project.write_revision(
            "queue",
            f"op.cyclone_upgrade({revision!r}{self.argument}{more})",
            f"op.cyclone_downgrade(start={revision!r}{self.argument})",
        )

    def installed(self) -> Installed | None:
        with self.engine.connect() as connection:
            return schema_version.installed(connection, self.schema)

    def catalog(self) -> Catalog:
        with self.engine.connect() as connection:
            return _ours(connection, self.schema)

    def migrate(self) -> None:
        """What `cyclone-sqla migrate` does."""
        with self.engine.begin() as connection:
            migrations.upgrade(connection, schema=self.schema)

    def check(self) -> migrations.Status:
        with self.engine.connect() as connection:
            return migrations.check(connection, self.schema)


def _ours(connection: Connection, schema: str | None) -> Catalog:
    """What is ours in a schema; not where columns stand, nor those that PostgreSQL remembers."""
    return {
        (kind, table, *(details[1:] if kind == "column" else details))
        for kind, table, *details in catalog(connection, schema)
        if "cyclone_" in f"{table} {details[0]}" and "pg.dropped" not in str(details)
    }


@pytest.fixture(params=[None, SCHEMA])
def history(request: pytest.FixtureRequest, empty_database: Database, tmp_path: Path) -> History:
    """On each database, in the default schema and in one of its own."""
    return History(tmp_path, empty_database, request.param)


@pytest.fixture(
    params=[
        pytest.param(("postgresql", SCHEMA), marks=pytest.mark.postgresql),
        pytest.param(("sqlite", None), marks=pytest.mark.sqlite),
    ],
    ids=str,
)
def one_of_each(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    """On each database once."""
    kind, schema = request.param
    return History(tmp_path, request.getfixturevalue(f"empty_{kind}"), schema)


@pytest.fixture
def behind(one_of_each: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """A history that ends before the newest revision of our tables."""
    one_of_each.project.upgrade()
    move_head(monkeypatch, tmp_path)
    return one_of_each


# ---- there and back ------------------------------------------------------------------------------


def test_the_applications_revision_makes_the_tables_that_the_command_makes(
    history: History,
) -> None:
    with history.engine.connect() as connection:
        migrations.upgrade(connection, schema=history.schema)
        made_by_the_command = _ours(connection, history.schema)
        connection.rollback()
    history.project.upgrade()
    assert history.catalog() == made_by_the_command
    assert history.installed() == Installed(HEAD, by_application=True)
    assert history.check().is_current
    with history.engine.connect() as connection:
        schema_version.require(connection, history.schema)
    history.project.downgrade("base")
    assert history.catalog() == set()
    assert history.installed() is None


def test_the_script_leads_to_the_same_tables(history: History) -> None:
    run_script(history.database, history.project.upgrade_script("head"), history.schema)
    by_script = history.catalog(), history.installed()
    assert "cyclone" not in str(history.project.differences())
    run_script(history.database, history.project.downgrade_script("queue:base"), history.schema)
    assert history.catalog() == set()
    assert history.installed() is None
    history.project.upgrade()
    assert (history.catalog(), history.installed()) == by_script


def test_autogenerate_adds_nothing_to_a_history_that_is_complete(one_of_each: History) -> None:
    one_of_each.project.upgrade()
    one_of_each.project.autogenerate("the shop")
    one_of_each.project.upgrade()
    assert one_of_each.project.differences() == []


def test_the_command_goes_there_and_back(empty_sqlite: Database, tmp_path: Path) -> None:
    history = History(tmp_path, empty_sqlite, None)
    for arguments in (["upgrade", "head"], ["downgrade", "base"], ["upgrade", "head", "--sql"]):
        done = history.project.alembic(*arguments)
        assert done.returncode == 0, done.stderr
    assert "INSERT INTO cyclone_alembic_version" in done.stdout
    assert history.installed() is None


def test_the_applications_naming_convention_is_not_for_our_tables(one_of_each: History) -> None:
    convention = 'metadata = MetaData(naming_convention={"ck": "x_%(constraint_name)s"})'
    models = MODELS.replace("    pass", f"    from sqlalchemy import MetaData\n    {convention}")
    one_of_each.project.write_models(models)
    one_of_each.project.upgrade()
    assert not [row for row in one_of_each.catalog() if "x_cyclone" in str(row)]


def test_a_revision_that_fails_leaves_nothing_on_a_server(
    empty_postgresql: Database, tmp_path: Path
) -> None:
    history = History(tmp_path, empty_postgresql, SCHEMA)
    history.project.write_revision("late", "raise ValueError", "pass", after="queue")
    with pytest.raises(ValueError):  # noqa: PT011 (it is our own)
        history.project.upgrade()
    assert history.catalog() == set()
    assert history.installed() is None


def test_a_downgrade_of_nothing_makes_nothing(empty_postgresql: Database, tmp_path: Path) -> None:
    history = History(tmp_path, empty_postgresql, SCHEMA)
    history.project.write_revision("queue", "pass", "op.cyclone_downgrade(schema='queue')")
    history.project.upgrade()
    history.project.downgrade("base")
    assert SCHEMA not in inspect(history.engine).get_schema_names()


# ---- when our head moved -------------------------------------------------------------------------


def test_autogenerate_leads_to_a_head_that_moved(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.project.upgrade()
    history.project.autogenerate("the shop")
    history.project.upgrade()
    move_head(monkeypatch, tmp_path)
    before = history.catalog()
    ((name, *moves),) = history.project.differences()
    assert (name, moves) == ("cyclone_upgrade", [history.schema, HEAD, NEXT])

    script = history.project.autogenerate("a newer queue")
    assert body_of(script, "upgrade") == [
        f"op.cyclone_upgrade('{NEXT}', start='{HEAD}'{history.argument})"
    ]
    assert body_of(script, "downgrade") == [
        f"op.cyclone_downgrade('{HEAD}', start='{NEXT}'{history.argument})"
    ]
    history.project.upgrade()
    assert history.installed() == Installed(NEXT, by_application=True)
    assert history.project.differences() == []
    ahead = history.catalog()
    assert ahead != before

    history.project.downgrade("-1")
    assert history.installed() == Installed(HEAD, by_application=True)
    assert history.catalog() == before

    # As a script, from where the first revision ends.
    revision = script.split("revision: str = '")[1].split("'")[0]
    parent = script.split("Revises: ")[1].split()[0]
    upgrade = history.project.upgrade_script(f"{parent}:{revision}")
    run_script(history.database, upgrade, history.schema)
    assert history.catalog() == ahead
    downgrade = history.project.downgrade_script(f"{revision}:{parent}")
    run_script(history.database, downgrade, history.schema)
    assert history.catalog() == before
    assert history.installed() == Installed(HEAD, by_application=True)


def test_our_tables_come_before_those_that_refer_to_them(
    empty_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, empty_database, None)
    history.project.upgrade()
    move_head(monkeypatch, tmp_path)
    history.project.write_models(MODELS, ORDER)
    upgrade = body_of(history.project.autogenerate("orders"), "upgrade")
    assert upgrade[0].startswith("op.cyclone_upgrade(")
    assert len(upgrade) > 1
    history.project.upgrade()
    history.project.downgrade("base")
    assert history.installed() is None


def test_a_schema_that_include_name_leaves_out_is_left_alone(
    empty_postgresql: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, empty_postgresql, SCHEMA)
    history.project.upgrade()
    history.project.autogenerate("the shop")
    history.project.upgrade()
    move_head(monkeypatch, tmp_path)
    assert history.project.differences()
    history.project.set_options(
        "include_name=lambda name, kind, _: (kind, name) != ('schema', 'queue')"
    )
    assert history.project.differences() == []


def test_who_meets_tables_that_are_behind_is_told_the_applications_command(
    behind: History,
) -> None:
    with behind.engine.connect() as connection, pytest.raises(SchemaError) as caught:
        schema_version.require(connection, behind.schema)
    message = str(caught.value)
    assert "\n" not in message
    assert f"at revision {HEAD}, this code needs {NEXT}; run: alembic upgrade head" in message
    assert [step.id for step in behind.check().pending] == [NEXT]


# ---- the two ways exclude each other -------------------------------------------------------------


def test_the_command_changes_nothing_of_the_applications(behind: History) -> None:
    before = behind.catalog()
    with pytest.raises(SchemaError, match=r"application's own Alembic history.*alembic upgrade"):
        behind.migrate()
    with behind.engine.begin() as connection, pytest.raises(SchemaError, match=r"op\.cyclone_down"):
        migrations.downgrade(connection, schema=behind.schema, revision="base")
    assert behind.catalog() == before


def test_the_command_has_nothing_to_do_where_the_application_did_it(one_of_each: History) -> None:
    one_of_each.project.upgrade()
    one_of_each.migrate()
    assert one_of_each.installed() == Installed(HEAD, by_application=True)


def test_a_revision_leaves_alone_what_the_command_made(one_of_each: History) -> None:
    one_of_each.migrate()
    with pytest.raises(CommandError, match=r"made by `cyclone-sqla migrate`.*adopt=True"):
        one_of_each.project.upgrade()
    one_of_each.project.write_revision(
        "queue", "pass", f"op.cyclone_downgrade('base'{one_of_each.argument})"
    )
    one_of_each.project.upgrade()
    with pytest.raises(CommandError, match="made by `cyclone-sqla migrate`"):
        one_of_each.project.downgrade("base")
    assert one_of_each.installed() == Installed(HEAD)


def test_a_revision_that_adopts_takes_over_what_the_command_made(one_of_each: History) -> None:
    one_of_each.write_queue(HEAD, more=", adopt=True")
    one_of_each.migrate()
    before = one_of_each.catalog()
    one_of_each.project.upgrade()
    assert one_of_each.catalog() == before
    assert one_of_each.installed() == Installed(HEAD, by_application=True)
    one_of_each.project.downgrade("base")
    assert one_of_each.catalog() == set()
    one_of_each.project.upgrade()
    assert one_of_each.catalog() == before, "where there is nothing to adopt, it makes them"


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["head", "+1", "0000", ""])
def test_a_revision_is_named_by_its_id(empty_sqlite: Database, tmp_path: Path, word: str) -> None:
    history = History(tmp_path, empty_sqlite, None)
    history.write_queue(word)
    with pytest.raises(CommandError, match=f"id of no revision.*has: base, {HEAD}"):
        history.project.upgrade()


@pytest.mark.parametrize(
    "call",
    [
        f"op.cyclone_upgrade('{HEAD}', start='{HEAD}')",
        "op.cyclone_upgrade('base')",
        f"op.cyclone_downgrade('{HEAD}', start='base')",
    ],
)
def test_a_call_that_leads_the_other_way_is_refused_in_a_script_too(
    empty_sqlite: Database, tmp_path: Path, call: str
) -> None:
    project = History(tmp_path, empty_sqlite, None).project
    project.write_revision("queue", call, "pass")
    for upgrade in (project.upgrade, project.upgrade_script):
        with pytest.raises(CommandError, match="the wrong way round"):
            upgrade("head")


def test_a_revision_that_starts_elsewhere_says_so(behind: History) -> None:
    parent = behind.project.head()
    behind.project.write_revision(
        "newer", f"op.cyclone_upgrade('{NEXT}'{behind.argument})", "pass", after=parent
    )
    with pytest.raises(CommandError, match=f'starts at base: write start="{HEAD}" into it'):
        behind.project.upgrade()
    assert behind.installed() == Installed(HEAD, by_application=True)


def test_a_script_has_to_be_told_where_a_downgrade_starts(
    empty_sqlite: Database, tmp_path: Path
) -> None:
    project = History(tmp_path, empty_sqlite, None).project
    project.write_revision("queue", f"op.cyclone_upgrade('{HEAD}')", "op.cyclone_downgrade()")
    project.upgrade()
    with pytest.raises(CommandError, match=r"can't look.*start="):
        project.downgrade_script("queue:base")
    project.downgrade("base")


def test_a_repeatable_snapshot_is_refused_in_one_line(
    empty_postgresql: Database, tmp_path: Path
) -> None:
    history = History(tmp_path, empty_postgresql, None)
    history.project.set_options(engine='isolation_level="SERIALIZABLE", ')
    with pytest.raises(CommandError, match="SERIALIZABLE"):
        history.project.upgrade()


def test_a_table_in_use_is_waited_for_no_longer_than_the_limit(
    empty_postgresql: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cyclone_sqla import application_history

    history = History(tmp_path, empty_postgresql, None)
    history.project.upgrade()
    monkeypatch.setattr(application_history, "LOCK_TIMEOUT", timedelta(milliseconds=50))
    with history.engine.begin() as connection:
        connection.execute(text("LOCK TABLE cyclone_job IN ACCESS SHARE MODE"))
        with pytest.raises(CommandError, match="was in use for more than"):
            history.project.downgrade("base")
    assert history.installed() == Installed(HEAD, by_application=True)

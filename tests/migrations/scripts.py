"""Running a script of SQL as its reader would."""

import shutil
import sqlite3
import subprocess

import pytest
from sqlalchemy import make_url

from cyclone_sqla.testing.postgresql.binaries import find_binaries
from tests.databases import Database


def run_script(database: Database, script: str, schema: str | None) -> None:
    """Run the script as its reader would: with psql, or in sqlite3."""
    if database.dialect == "sqlite":
        _run_in_sqlite3(database, script, schema)
        return
    psql = find_binaries() / "psql"
    program = str(psql) if psql.exists() else shutil.which("psql")
    if program is None:
        pytest.skip("this PostgreSQL comes without psql")
    url = make_url(database.url).set(drivername="postgresql")
    command = [program, "-X", "-v", "ON_ERROR_STOP=1", url.render_as_string(hide_password=False)]
    subprocess.run(
        command, input=script, text=True, encoding="utf-8", check=True, capture_output=True
    )


def _run_in_sqlite3(database: Database, script: str, schema: str | None) -> None:
    file = make_url(database.url).database
    connection = sqlite3.connect(str(file), isolation_level=None)
    if schema is not None:
        name = '"' + schema.replace('"', '""') + '"'
        connection.execute(f"ATTACH ? AS {name}", (f"{file}.attached",))
    connection.executescript(script)
    connection.close()

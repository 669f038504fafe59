"""A cyclone-sqla that is one revision ahead of this one, for as long as a test."""

import shutil
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from cyclone_sqla import migrations, schema_version

NEXT = "9999"

_ADDITIVE = f'''
"""One more column."""

import sqlalchemy as sa

revision, down_revision = "{NEXT}", "{schema_version.HEAD}"

def upgrade(op, schema):
    op.add_column("cyclone_job", sa.Column("test_only", sa.Text()), schema=schema)

def downgrade(op, schema):
    op.drop_column("cyclone_job", "test_only", schema=schema)
'''


def move_head(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """From now on the newest revision is `NEXT`, and no other is supported."""
    scripts = directory / "newer"
    shutil.copytree(Path(migrations.__file__).parents[1] / "alembic", scripts)
    (scripts / "versions" / f"{NEXT}.py").write_text(_ADDITIVE.lstrip())
    monkeypatch.setattr(migrations, "_scripts", lambda: ScriptDirectory(scripts))
    monkeypatch.setattr(schema_version, "REVISIONS", (*schema_version.REVISIONS, NEXT))
    monkeypatch.setattr(schema_version, "HEAD", NEXT)
    monkeypatch.setattr(schema_version, "SUPPORTED", frozenset({NEXT}))

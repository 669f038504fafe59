"""Runs Alembic's own command line, for whoever changes the tables.

`alembic revision --autogenerate` compares the models with the database at CYCLONE_DATABASE_URL.
Users' databases are migrated by `cyclone-sqla migrate`: it loads the revisions and not this file.
"""

from __future__ import annotations

import os

from alembic import context
from alembic.operations import Operations

from cyclone_sqla.migrations import own_transaction
from cyclone_sqla.models import Base, tables_in
from cyclone_sqla.schema_version import VERSION_TABLE

with own_transaction(os.environ["CYCLONE_DATABASE_URL"]) as connection:
    ours = {table.name for table in tables_in(None).of(connection.dialect.name)}
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        # Our own plugin hides these tables from applications.
        autogenerate_plugins=["alembic.autogenerate.*", "~alembic.autogenerate.cyclone"],
        include_name=lambda name, kind, _parents: kind != "table" or name in ours,
        include_object=lambda _object, name, kind, *_: kind != "table" or name in ours,
    )
    context.run_migrations(op=Operations(context.get_context()), schema=None)

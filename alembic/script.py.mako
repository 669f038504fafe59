"""${message}"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade(op: Operations, schema: str | None) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(op: Operations, schema: str | None) -> None:
    ${downgrades if downgrades else "pass"}

"""What Alembic loads: it leaves our tables to us, and knows `op.cyclone_upgrade`.

Alembic 1.18 and later load this module by its entry point, and the application's env.py needs
nothing. For earlier releases, in env.py::

    from cyclone_sqla.alembic_plugin import include_name, include_object, install

    install()
    context.configure(..., include_name=include_name, include_object=include_object)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SAWarning

from cyclone_sqla.models import Base
from cyclone_sqla.schema_version import VERSION_TABLE

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

# Alembic isn't imported here: its import loads this module, and finds `setup` only in a whole one.

__all__ = ["include_name", "include_object", "install", "setup"]

OURS = frozenset({VERSION_TABLE, *(table.name for table in Base.metadata.sorted_tables)})
"""The names of our tables, whatever schema they are in."""


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:
    """Whether something in the database is not ours: for `include_name` in env.py."""
    table = name if type_ == "table" else parent_names.get("table_name")
    return table not in OURS


def include_object(
    object: Any,  # noqa: A002 (Alembic calls it so)
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: Any,
) -> bool:
    """Whether a table, column, index or constraint is not ours: for `include_object` in env.py."""
    table = object if type_ == "table" else getattr(object, "table", None)
    return getattr(table, "name", None) not in OURS


def setup(plugin: Plugin) -> None:
    """Alembic 1.18 and later call it in the middle of their import: most of it isn't there yet."""
    from alembic.util import DispatchPriority

    import_module("cyclone_sqla.alembic_operations")  # registers them, and may be half imported too
    plugin.add_autogenerate_comparator(
        _leave_out_ours, "autogenerate", priority=DispatchPriority.FIRST
    )
    plugin.add_autogenerate_comparator(_propose_upgrades, "schema")


@cache
def install() -> None:
    """Give `op.cyclone_upgrade` to an Alembic before 1.18; later ones have it already."""
    if find_spec("alembic.runtime.plugins") is None:
        from alembic.autogenerate import comparators

        from cyclone_sqla.alembic_operations import propose_upgrades

        comparators.dispatch_for("schema")(propose_upgrades)


def _leave_out_ours(context: AutogenContext, _upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Ask our filters before the application's own."""
    from alembic.util import PriorityDispatchResult

    # Where the application has no table yet, Alembic reflects all that there are.
    warnings.filterwarnings("ignore", "Skipped unsupported reflection .* index cyclone_", SAWarning)
    their_names, their_objects = context.run_name_filters, context.run_object_filters

    def run_name_filters(name: Any, type_: Any, parent_names: Any) -> bool:
        return include_name(name, type_, parent_names) and their_names(name, type_, parent_names)

    def run_object_filters(
        object_: Any, name: Any, type_: Any, reflected: bool, compare_to: Any
    ) -> bool:
        given = (object_, name, type_, reflected, compare_to)
        return include_object(*given) and their_objects(*given)

    context.run_name_filters = run_name_filters  # type: ignore[method-assign]
    context.run_object_filters = run_object_filters  # type: ignore[method-assign]
    return PriorityDispatchResult.CONTINUE


def _propose_upgrades(
    context: AutogenContext, upgrade_ops: UpgradeOps, schemas: set[str | None]
) -> PriorityDispatchResult:
    from alembic.util import PriorityDispatchResult

    from cyclone_sqla.alembic_operations import propose_upgrades

    propose_upgrades(context, upgrade_ops, schemas)
    return PriorityDispatchResult.CONTINUE


class _Module(ModuleType):
    """Alembic 1.18 to 1.20.0 iterate over what an entry point names; later ones want a module."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _Module

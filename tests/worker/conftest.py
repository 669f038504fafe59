"""Workers are started on databases without our tables, too."""

from tests.migrations.conftest import empty_postgresql, empty_sqlite

__all__ = ["empty_postgresql", "empty_sqlite"]

"""The command line is tested on the same databases as the migrations."""

from tests.migrations.conftest import empty_database, empty_postgresql, empty_sqlite

__all__ = ["empty_database", "empty_postgresql", "empty_sqlite"]

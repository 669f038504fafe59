"""The command line is tested on the same databases as the migrations."""

import pytest

from tests.migrations.conftest import empty_database, empty_postgresql, empty_sqlite

__all__ = ["empty_database", "empty_postgresql", "empty_sqlite"]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run where nothing is configured."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    for name in ("CYCLONE_DATABASE_URL", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

"""Which database and which application a command works on."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url

from cyclone_sqla.cli.options import find_target, load_app
from cyclone_sqla.errors import ConfigurationError

_SHOP = """
from sqlalchemy import create_engine
from cyclone_sqla import Cyclone
cyclone = Cyclone(database="sqlite:///shop.db", schema="queue")
by_engine = Cyclone(database=create_engine("sqlite:///engine.db"))
without = Cyclone()
class parts:
    cyclone = cyclone
number = 42
"""


@pytest.fixture(autouse=True)
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory with an application, `shop.py`, that is not installed."""
    (tmp_path / "shop.py").write_text(_SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("shop", "broken", "silent"):
        sys.modules.pop(name, None)


def test_the_application_names_database_and_schema() -> None:
    target = find_target(None, None, "shop:cyclone")
    assert (target.url, target.schema) == (make_url("sqlite:///shop.db"), "queue")
    assert target.app is load_app("shop:cyclone")


def test_options_come_before_the_application() -> None:
    target = find_target("sqlite:///other.db", "mine", "shop:cyclone")
    assert (target.url, target.schema) == (make_url("sqlite:///other.db"), "mine")


def test_the_applications_engine_is_kept() -> None:
    target = find_target(None, None, "shop:by_engine")
    assert isinstance(target.database, Engine)
    assert target.url == make_url("sqlite:///engine.db")


def test_an_application_without_a_database_leads_to_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert find_target(None, None, "shop:without").url == make_url("sqlite:///cyclone.db")
    assert "using sqlite:///cyclone.db" in capsys.readouterr().err


def test_pyproject_names_the_application(shop: Path) -> None:
    (shop / "pyproject.toml").write_text('[tool.cyclone-sqla]\napp = "shop:cyclone"\n')
    assert find_target(None, None, None).url == make_url("sqlite:///shop.db")
    assert find_target(None, None, "shop:by_engine").url == make_url("sqlite:///engine.db")


def test_a_pyproject_without_our_table_says_nothing(shop: Path) -> None:
    (shop / "pyproject.toml").write_text("[tool.other]\n")
    assert find_target("sqlite:///x.db", None, None).app is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[tool", "pyproject.toml can't be read"),
        ("[tool.cyclone-sqla]\napp = 1\n", "must be a text"),
    ],
)
def test_a_wrong_pyproject_is_named(shop: Path, content: str, says: str) -> None:
    (shop / "pyproject.toml").write_text(content)
    with pytest.raises(ConfigurationError, match=says):
        find_target("sqlite:///x.db", None, None)


def test_an_attribute_of_an_attribute_is_found() -> None:
    assert load_app("shop:parts.cyclone") is load_app("shop:cyclone")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shop", "must be written as module:attribute"),
        ("shop:", "must be written as module:attribute"),
        (":cyclone", "must be written as module:attribute"),
        ("nowhere:cyclone", "No module named 'nowhere'"),
        ("shop.nowhere:cyclone", "'shop' is not a package"),
        ("shop:nothing", "the module shop has no nothing"),
        ("shop:number", "shop:number is a int, not a Cyclone"),
        ("..shop:cyclone", "can't import the application's module ..shop"),
    ],
)
def test_what_is_no_application_is_named_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_app(name)
    assert "\n" not in str(caught.value)


def test_an_application_that_fails_is_named_with_its_line(shop: Path) -> None:
    (shop / "broken.py").write_text("import shop\n\nraise RuntimeError('no settings')\n")
    with pytest.raises(ConfigurationError, match="RuntimeError: no settings") as caught:
        load_app("broken:cyclone")
    assert f"({shop / 'broken.py'}:3)" in str(caught.value)

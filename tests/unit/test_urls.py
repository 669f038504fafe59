"""Database URLs: any password works, none is shown, and our own drivers are found."""

import pytest
from sqlalchemy import URL, make_url

from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.urls import masked, parsed, worker_url

PASSWORD = "p%40s%s@:/#?"


def test_any_password_survives_the_url() -> None:
    url = URL.create("postgresql", "me", PASSWORD, "db", 5432, "shop")
    text = url.render_as_string(hide_password=False)
    assert parsed(text).password == PASSWORD
    assert worker_url(parsed(text)).password == PASSWORD


@pytest.mark.parametrize(
    "text",
    ["", "shop.db", "://", "postgresql://me:s3@cret@db/shop", "postgresql://me:s3/cret@db:x/shop"],
)
def test_what_is_no_url_is_not_repeated(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsed(text)
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_at_sign_in_a_path_is_no_password() -> None:
    assert parsed("sqlite:////var/lib/a@b/c@d.db").database == "/var/lib/a@b/c@d.db"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:s3cret@db/shop",
        "postgresql://db/shop?password=s3cret",
        "postgresql://me:s3cret@db/shop?sslpassword=s3cret&sslmode=require",
        "sqlite+pysqlcipher://:s3cret@/shop.db",
    ],
)
def test_a_masked_url_shows_no_secret(text: str) -> None:
    shown = masked(make_url(text))
    assert "s3cret" not in shown
    assert shown.partition("://")[0] == text.partition("://")[0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("postgresql://db/shop", "postgresql+psycopg://db/shop"),
        ("postgresql+psycopg2://db/shop", "postgresql+psycopg://db/shop"),
        ("postgresql+asyncpg://me:x@db:1/shop", "postgresql+psycopg://me:x@db:1/shop"),
        (
            "postgresql+asyncpg://db/shop?ssl=require",
            "postgresql+psycopg://db/shop?sslmode=require",
        ),
        (
            "postgresql+asyncpg://db/shop?prepared_statement_cache_size=0&timeout=3",
            "postgresql+psycopg://db/shop?connect_timeout=3",
        ),
        ("postgres://db/shop", "postgresql+psycopg://db/shop"),
        ("sqlite+aiosqlite:///shop.db", "sqlite+pysqlite:///shop.db"),
        ("sqlite:///shop.db", "sqlite:///shop.db"),
        ("mssql+pyodbc://db/shop", "mssql+pyodbc://db/shop"),
    ],
)
def test_a_url_of_the_application_leads_to_our_driver(theirs: str, ours: str) -> None:
    assert worker_url(make_url(theirs)) == make_url(ours)

"""Keys: what every database stores and compares alike, or a refusal that names the option."""

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclone_sqla.errors import InvalidJobError, InvalidKeyError
from cyclone_sqla.keys import MAX_KEY_BYTES, check_key


class _Text(str, enum.Enum):  # noqa: UP042 - str() of this one is not its value
    PAID = "paid"


@pytest.mark.parametrize(
    "key",
    ["a", " ", "order:42", "a\nb", "Ä", "\U0001f300", "x" * MAX_KEY_BYTES, "é" * 128],
)
def test_a_storable_key_is_kept_as_it_is(key: str) -> None:
    assert check_key("unique", key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "must not be empty"),
        ("x" * 257, "257 bytes"),
        ("é" * 129, "258 bytes"),
        ("\U0001f300" * 65, "260 bytes"),
        ("a\x00b", "NUL"),
        ("\ud800", "surrogate"),
        (b"a", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_a_database_could_not_store_is_refused(key: object, reason: str) -> None:
    with pytest.raises(InvalidKeyError, match=reason) as caught:
        check_key("idempotency_key", key)
    assert str(caught.value).startswith("idempotency_key: ")
    assert isinstance(caught.value, InvalidJobError | ValueError)


def test_a_str_enum_is_stored_by_its_value() -> None:
    key = check_key("unique", _Text.PAID)
    assert key == "paid"
    assert type(key) is str


@given(st.text(min_size=1, alphabet=st.characters(codec="utf-8", exclude_characters="\0")))
def test_the_limit_is_in_bytes_of_utf_8(key: str) -> None:
    if len(key.encode()) <= MAX_KEY_BYTES:
        assert check_key("unique", key) == key
    else:
        with pytest.raises(InvalidKeyError):
            check_key("unique", key)

"""Keys and other short texts of a job: what every database can store and compare alike."""

from __future__ import annotations

from cyclone_sqla.errors import InvalidKeyError

MAX_KEY_BYTES = 256
"""How long a key may be, in bytes of UTF-8."""


def check_key(name: str, value: object) -> str:
    """The key, if it is one: a non-empty str of valid UTF-8 without NUL, at most 256 bytes.

    ``name`` is the option that is checked (``unique``); the InvalidKeyError speaks of it. Nothing
    is stripped, folded or cut: two keys are one key only if they are equal.
    """
    fault = text_fault(value, MAX_KEY_BYTES)
    if fault is not None:
        raise InvalidKeyError(f"{name}: {fault}")
    assert isinstance(value, str)
    return plain(value)


def plain(text: str) -> str:
    """The characters alone, without what a subclass of str (an Enum, say) makes of them."""
    return str.__str__(text)


def text_fault(value: object, max_bytes: int | None = None) -> str | None:
    """Why this can't be stored as a non-empty text, or None if it can."""
    if not isinstance(value, str):
        return f"must be a str, not {type(value).__name__}"
    if not value:
        return "must not be empty"
    return unstorable(value) or _too_long(value, max_bytes)


def unstorable(text: str) -> str | None:
    """Why no database holds this text (NUL, a lone surrogate), or None."""
    if "\x00" in text:
        return "holds a NUL character, which PostgreSQL cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds a lone surrogate, so it is not valid Unicode"
    return None


def _too_long(text: str, max_bytes: int | None) -> str | None:
    size = len(text.encode())
    if max_bytes is None or size <= max_bytes:
        return None
    return f"is {size} bytes long in UTF-8, more than {max_bytes}"

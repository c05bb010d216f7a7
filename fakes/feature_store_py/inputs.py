"""What callers hand in, made plain before any transport sees it: so the same input meets the same end over HTTP and in
process. Each function raises the error of ``fakes.errors`` that the service would answer with.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import msgspec
import numpy as np
import pyarrow as pa

from ..errors import FakeError, InvalidParameter, InvalidTimestamp, InvalidVersion, MalformedBody, SchemaMismatch
from ..store import as_array, check_name, check_version, shown

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
USERNAME_CHARS_MAX: Final = 256


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, NumPy's included. A bool is none: as a key or a time it is a mistake."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def setting(what: str, value: object) -> int:
    """A number among a view's settings; its range is checked with the view. Raises InvalidParameter."""
    if not is_integer(value) or not INT64_MIN <= value <= INT64_MAX:
        raise InvalidParameter(f"{what} {shown(value)}: want an integer")
    return operator.index(value)


def version(value: object) -> str:
    """Raises InvalidVersion."""
    if value is not None and not isinstance(value, str):
        raise InvalidVersion(f"version {shown(value)}: want a str, got a {type(value).__name__}")
    return str.__str__(check_version(value))  # a plain one: what an enum's or NumPy's str() says may be something else


def ts(value: object) -> int | None:
    """The ts of a write, in ms; None: the store's clock. Raises InvalidTimestamp."""
    return None if value is None else _milliseconds("ts", value, 1)


def cursor(value: object) -> int:
    """The ts to read changes after; 0 for all. Raises InvalidTimestamp."""
    return _milliseconds("cursor", value, 0)


def _milliseconds(what: str, value: object, low: int) -> int:
    if not is_integer(value) or not low <= value <= INT64_MAX:
        raise InvalidTimestamp(f"{what} {shown(value)}: want an integer of milliseconds, {low} to {INT64_MAX}")
    return operator.index(value)


def name(what: str, value: object) -> str:
    """The name of an object of the catalogue. Raises InvalidParameter."""
    if not isinstance(value, str):
        raise InvalidParameter(f"{what} {shown(value)}: want a str, got a {type(value).__name__}")
    return str.__str__(check_name(what, value))


def is_name(value: object) -> TypeGuard[str]:
    """Whether an object of the catalogue can have this name."""
    try:
        name("object", value)
    except InvalidParameter:
        return False
    return True


def login(username: object, password: object) -> None:
    """Raises ValueError, which quotes no password."""
    if not isinstance(username, str) or not isinstance(password, str):
        raise ValueError("featuredb_username and featuredb_password are needed, each a str")
    if not username.isprintable() or len(username) > USERNAME_CHARS_MAX or ":" in username:
        raise ValueError(
            f"featuredb_username {shown(username)}: want at most {USERNAME_CHARS_MAX} printable characters and no colon"
        )
    try:
        password.encode()
    except UnicodeEncodeError:
        raise ValueError("featuredb_password is no valid Unicode") from None


def keys(values: Any) -> pa.Int64Array:
    """Keys to look up: any integers within int64. Raises SchemaMismatch, and never rounds, cuts or guesses."""
    if isinstance(values, pa.Array | pa.ChunkedArray | np.ndarray):
        array = _integers(values)
    else:
        found = _listed("keys", values, "integers")
        for number, key in enumerate(found):
            if not is_integer(key) or not INT64_MIN <= key <= INT64_MAX:
                raise SchemaMismatch(f"key {shown(key)} (number {number}): want an int64")
        array = pa.array(found, pa.int64())
    if array.null_count:
        raise SchemaMismatch("keys: a null is among them")
    return array


def _listed(what: str, values: Any, of: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise SchemaMismatch(f"{what} {shown(values)}: want a sequence of {of}, got a {type(values).__name__}")
    try:
        return list(values)
    except TypeError:  # NumPy's arrays of no dimension only look iterable
        raise SchemaMismatch(f"{what}: want a sequence of {of}, got a {type(values).__name__}") from None


def _integers(values: Any) -> pa.Int64Array:
    kind = values.dtype.kind if isinstance(values, np.ndarray) else values.type
    if isinstance(values, np.ndarray) and kind == "O":
        return keys(values.tolist())
    if isinstance(values, np.ndarray):
        good = values.ndim == 1 and (kind in "iu" or not len(values))
    else:
        good = pa.types.is_integer(kind)
    try:
        if good:
            return as_array(values, pa.int64()).cast(pa.int64())
    except (pa.ArrowException, ValueError, OverflowError):
        raise SchemaMismatch("keys: one is beyond int64") from None
    raise SchemaMismatch(f"keys: want one column of integers, got {kind}")


def names(values: Any) -> pa.StringArray:
    """Embedding names to look up. Raises SchemaMismatch."""
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        values = _listed("pk", values, "strings")
        for number, name in enumerate(values):
            if not isinstance(name, str):
                raise SchemaMismatch(f"pk {shown(name)} (number {number}): want a str")
    try:
        array = as_array(values, pa.string())
    except UnicodeEncodeError:
        raise SchemaMismatch("pk: want strings of valid Unicode") from None
    if array.type != pa.string() or array.null_count:
        raise SchemaMismatch(f"pk: want a column of strings without nulls, got {array.type}")
    return array


def lookup(pk: Any, sk: Any) -> pa.RecordBatch:
    """The columns pk and sk of a lookup. Raises SchemaMismatch."""
    columns = [names(pk), keys(sk)]
    if len(columns[0]) != len(columns[1]):
        raise SchemaMismatch(f"lookup: {len(columns[0])} pk and {len(columns[1])} sk; want equally many")
    return pa.RecordBatch.from_arrays(columns, ["pk", "sk"])


def rows(data: object) -> list[dict[str, Any]]:
    """Raises TypeError for what is no list of rows."""
    if isinstance(data, str | bytes | bytearray) or not isinstance(data, Sequence):
        raise TypeError(f"data is a {type(data).__name__}; want a list of rows, each a dict of the view's three fields")
    return list(data)


def encoded(part: Sequence[dict[str, Any]]) -> bytes | FakeError:
    """Rows as JSON, or the refusal that sending them would meet. Raises TypeError for what JSON has no form for."""
    try:
        return msgspec.json.encode(part, enc_hook=_plain)
    except (ValueError, RecursionError) as error:  # half a surrogate pair, an integer of thousands of digits; nesting
        return MalformedBody(f"content: not JSON ({error})")


def _plain(value: Any) -> Any:
    """NumPy arrays and scalars for the JSON path; float32 values stay exact, since JSON numbers are doubles."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, int):  # of a type of its own
        return int(value)
    raise TypeError(f"a row holds a {type(value).__name__}; want str, int and lists of numbers")

"""What a target holds is counted once, in whichever form, and what is not its own is left out."""

import functools
import io
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.store import Store
from deltaproof.simulator.virtual.memory import held_bytes

MANY = 1_000_000


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held
        self.self = self


def in_a_stack(held: object) -> Any:
    return sys._getframe()


def table() -> pa.Table:
    return pa.table({"a": np.zeros(MANY // 8, np.int64)})


FORMS: dict[str, Callable[[], object]] = {
    "array": lambda: np.zeros(MANY, np.uint8),
    "view of a part of an array": lambda: np.zeros(MANY, np.uint8)[5:10],
    "table": table,
    "part of a table": lambda: table().slice(10, 1),
    "batches": lambda: table().to_batches(max_chunksize=100),
    "buffer": lambda: pa.py_buffer(bytes(MANY)),
    "bytes": lambda: bytes(MANY),
    "file in memory": lambda: io.BytesIO(bytes(MANY)),
    "text": lambda: "x" * MANY,
    "rows of numbers": lambda: [{"key": n, "row": [float(n), -float(n)]} for n in range(3_500)],
    "queue": lambda: deque([bytes(MANY)]),
    "object": lambda: Holder(Holder(bytes(MANY))),
    "closure": lambda: (lambda held: lambda: held)(bytes(MANY)),
    "call to come": lambda: functools.partial(print, bytes(MANY)),
    "method": lambda: Holder(bytes(MANY)).__init__,  # type: ignore[misc]
    "local variable": lambda: in_a_stack(bytes(MANY)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_counted_once(form: str) -> None:
    held = FORMS[form]()
    bytes_ = held_bytes([held, Holder(held), [held, held]])
    assert 0.95 * MANY < bytes_ < 1.35 * MANY
    assert held_bytes([held, Holder(held), [held, held]]) == bytes_


def test_what_arrays_and_tables_share_is_counted_once() -> None:
    rows = np.zeros((MANY // 40, 10), np.float32)
    flat = pa.array(rows.reshape(-1))
    assert held_bytes([rows, rows[3:], flat, pa.table({"a": flat}), flat[7:]]) < 1.1 * MANY


def test_the_simulators_own_is_left_out() -> None:
    store: Any = Store(lambda: 0)
    store.held = bytes(MANY)
    assert held_bytes([Holder(store), np, test_every_form_is_counted_once, Holder]) < 10_000

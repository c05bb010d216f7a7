"""Rows published as int8 are matched with the model: exactly as FBGEMM makes them, or as near as its format can be."""

from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltaproof.conformance import evidence, int8
from deltaproof.conformance.judge import judge
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.verdict import Verdict
from deltaproof.reference import delta
from deltaproof.simulator import target
from deltaproof.simulator.history import LedgerTable
from deltaproof.simulator.scenario import Table
from deltaproof.simulator.virtual.engine import VirtualEngine

NUMBERS = st.one_of(
    st.floats(-100, 100, width=32), st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0, 1e-6, 1e-12, 6e4])
)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([4, 8])), elements=NUMBERS)


@given(ROWS)
def test_two_encoders_that_share_no_code_agree_to_the_bit(rows: np.ndarray) -> None:
    assert int8.encode(rows).tobytes() == delta.quantise(rows).tobytes()


def encoded(
    rows: np.ndarray, scale: np.ndarray, offset: np.ndarray, rounding: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Rows in int8 with this scale and offset (n, 1), which are rounded to fp16 after the numbers were made."""
    numbers = np.clip(rounding((rows - offset) / np.where(scale == 0, 1, scale)), 0, 255).astype(np.uint8)
    trailer = np.concatenate([scale, offset], axis=1).astype("<f2")
    return np.concatenate([numbers, trailer.view(np.uint8)], axis=1)


def ledger_of(*versions: np.ndarray) -> LedgerTable:
    """One table that held these rows (n, dim), step after step from 0 on."""
    first, *later = versions
    count, none = len(first), np.empty(0, np.int64)
    return LedgerTable(
        table=Table(name="t", rows=count, dim=first.shape[1]),
        embedding_name="t",
        initial=first,
        steps=np.repeat(np.arange(1, len(versions)), count),
        keys=np.tile(np.arange(count), len(later)),
        values=np.concatenate(later) if later else np.empty((0, first.shape[1]), np.float32),
        lookup_steps=none,
        lookup_ranks=none,
        lookup_keys=none,
        host=np.zeros(count, np.int32),
    )


def half_up(numbers: np.ndarray) -> np.ndarray:
    return np.floor(numbers + 0.5)


@given(ROWS, st.sampled_from([np.rint, half_up]))
@example(np.array([[-127.5, 1.0, 3.0, 127.5]], np.float32), half_up)  # half a step off, and FBGEMM rounds down
def test_a_row_that_was_rounded_in_another_way_is_the_models(
    rows: np.ndarray, rounding: Callable[[np.ndarray], np.ndarray]
) -> None:
    wide = rows.astype(np.float64)
    low, high = wide.min(axis=1, keepdims=True), wide.max(axis=1, keepdims=True)
    made = encoded(wide, (high - low) / 255, low, rounding)
    far = rows + 1000 + np.abs(rows)
    first, last = evidence.held(ledger_of(far, rows, far), np.arange(len(rows)), made)
    assert (first == 1).all()
    assert (last == 1).all()


@given(ROWS.filter(lambda rows: bool((np.ptp(rows, axis=1) > 0.01).all())), st.data())
def test_a_row_that_is_off_by_more_than_rounding_is_not(rows: np.ndarray, data: st.DataObject) -> None:
    step = np.ptp(rows, axis=1, keepdims=True) / 255 + np.abs(rows).max(axis=1, keepdims=True) / 1000
    place = data.draw(st.integers(0, rows.shape[1] - 1))
    wrong = rows.copy()
    wrong[:, place] += (2 * step)[:, 0] * np.where(np.arange(len(rows)) % 2, 1, -1)
    made = int8.encode(wrong)
    first, last = evidence.held(ledger_of(rows), np.arange(len(rows)), made)
    assert (first == evidence.NEVER).all()
    assert (last == evidence.NEVER).all()


def test_the_value_of_each_step_is_told_apart_and_one_that_came_back_lasts() -> None:
    a, b = np.eye(4, dtype=np.float32), np.full((4, 4), 0.5, np.float32)
    ledger = ledger_of(a, b, a, b)
    keys = np.arange(4)
    for rows, expected in ((a, (0, 2)), (b, (1, evidence.FOREVER))):
        first, last = evidence.held(ledger, keys, int8.encode(rows))
        assert (set(first.tolist()), set(last.tolist())) == ({expected[0]}, {expected[1]})


KNOWN = {"S02": "json", "S03": "arrow", "S13": "arrow", "S28": "json", "S31": "arrow", "S33": "json", "S40": "arrow"}


@pytest.mark.parametrize(("specimen", "how"), list(KNOWN.items()))
def test_known_bugs_are_found_in_int8_too(specimen: str, how: str) -> None:
    known, engine = SPECIMENS[specimen], VirtualEngine()
    publisher = msgspec.structs.replace(known.scenario.publisher, embedding_type="int8", upload_format=how)
    scenario = msgspec.structs.replace(known.scenario, publisher=publisher)
    assert judge(engine.run(scenario)).verdict is Verdict.HELD
    found: set[str] = set()
    for variant in range(30):
        report = judge(engine.run(scenario, f"specimen:{specimen}", variant=variant))
        found = {f.property for f in report.findings if f.violations}
        if set(known.properties) <= found:
            return
    pytest.fail(f"{known.properties} did not report {specimen}, {found} did")


@pytest.mark.parametrize(("asked", "dim"), [("float32", 4), ("int8", 8)])
def test_rows_of_another_type_are_no_rows_even_if_their_length_fits(asked: str, dim: int) -> None:
    scenario = msgspec.structs.replace(SPECIMENS["S02"].scenario, faults=())
    publisher = msgspec.structs.replace(scenario.publisher, embedding_type=asked)
    history = VirtualEngine().run(msgspec.structs.replace(scenario, publisher=publisher))
    other = pa.uint8() if asked == "float32" else pa.float32()
    name = next(iter(history.manifest.values()))
    rows = pa.table({"pk": [name], "sk": [1], "ts": [1], "embedding": pa.array([[1] * dim], pa.list_(other))})
    [found] = [rows for rows in evidence.match(history, rows).values() if len(rows.keys)]
    assert not found.sized.any()
    assert (found.last == evidence.NEVER).all()


def test_a_target_that_publishes_another_type_than_it_was_asked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = target.settings_of
    floats = lambda context: msgspec.structs.replace(made(context), embedding_type="float32")  # noqa: E731
    monkeypatch.setattr(target, "settings_of", floats)
    scenario = SPECIMENS["S02"].scenario
    publisher = msgspec.structs.replace(scenario.publisher, embedding_type="int8")
    report = judge(VirtualEngine().run(msgspec.structs.replace(scenario, publisher=publisher)))
    assert "as int8" in {f.property: f for f in report.findings}["no-phantom-rows"].violations[0].message

"""The errors table: complete, consistent, and what the wire says."""

from __future__ import annotations

from deltaproof.fakes import errors
from deltaproof.fakes.errors import ERRORS, FakeError, Injected, Refused, code_for_status


def _subclasses(base: type[FakeError]) -> set[type[FakeError]]:
    return {base}.union(*map(_subclasses, base.__subclasses__()))


def test_every_refusal_has_a_row_that_says_nothing_was_applied() -> None:
    for kind in _subclasses(Refused) - {Refused}:
        row = ERRORS[kind.dotted or kind.__name__]
        assert row.applied == "no"
        assert row.status is not None
        assert 400 <= row.status < 500


def test_statuses_mean_one_thing() -> None:
    for row in ERRORS.values():
        if row.status is not None and row.status >= 500:
            assert (row.applied, row.retriable) == ("unknown", True), row
        elif row.status is not None:
            assert row.applied == "no", row
        assert row.meaning


def test_bare_statuses_map_to_rows_of_the_same_verdict() -> None:
    for status in range(400, 600):
        row = ERRORS[code_for_status(status)]
        assert row.applied == ("unknown" if status >= 500 else "no")
        assert row.retriable == (status >= 500 or status in (401, 408, 429))


def test_the_tree_in_the_docstring_names_every_class() -> None:
    for kind in _subclasses(FakeError):
        assert kind.__name__ in (errors.__doc__ or "")


def test_injected_errors_take_the_code_of_their_status() -> None:
    assert Injected(429, "x").code == "Throttling"
    assert Injected(503, "x").spec.applied == "unknown"

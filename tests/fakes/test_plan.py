"""The plan that all the fakes share: order, skip, count (windows, probability, outages: test_fault_kinds.py)."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import given

from deltaproof.fakes.errors import InvalidParameter
from deltaproof.fakes.plan import Plan, Planned


class Strikes(Planned, tag="strikes", kw_only=True, frozen=True):
    word: str = ""


class Stacks(Strikes, tag="stacks", kw_only=True, frozen=True):
    STACKS: ClassVar[bool] = True


def counts(plan: Plan[Strikes]) -> dict[str, int]:
    return {entry.fault.id: entry.fired for entry in plan.fired()}


COUNTS = st.integers(1, 3)
SKIPS = st.integers(0, 4)


@given(skip=SKIPS, count=COUNTS, requests=st.text("ab", max_size=12))
def test_a_lone_fault_strikes_the_requests_after_skip_and_count_of_them(skip: int, count: int, requests: str) -> None:
    plan: Plan[Strikes] = Plan()
    plan.add(Strikes(id="f", skip=skip, count=count, word="a"))
    struck = [plan.meet(lambda fault, word=word: fault.word == word)[1] is not None for word in requests]  # type: ignore[misc]
    matching = [at for at, word in enumerate(requests) if word == "a"]
    assert [at for at, hit in enumerate(struck) if hit] == matching[skip : skip + count]
    (entry,) = plan.fired()
    assert (entry.seen, entry.fired) == (len(matching), sum(struck))


@given(faults=st.lists(st.tuples(st.booleans(), SKIPS, COUNTS), max_size=4))
def test_every_fault_fires_exactly_its_count_if_enough_requests_come(faults: list[tuple[bool, int, int]]) -> None:
    plan: Plan[Strikes] = Plan()
    for number, (stacks, skip, count) in enumerate(faults):
        plan.add((Stacks if stacks else Strikes)(id=str(number), skip=skip, count=count))
    deciding = 0
    for _ in range(30):
        stacked, main, _ = plan.meet()
        assert all(fault.STACKS for fault in stacked)
        deciding += main is not None
    assert counts(plan) == {str(number): count for number, (_, _, count) in enumerate(faults)}
    assert deciding == sum(count for stacks, _, count in faults if not stacks), "two faults decided one request"


def test_setting_a_plan_starts_counts_anew_and_a_bad_one_changes_nothing() -> None:
    plan: Plan[Strikes] = Plan()
    plan.set([Strikes(id="a"), Strikes(id="b")])
    plan.meet()
    for bad in ([Strikes(id="c"), Strikes(id="c")], [Strikes(id="")], [Strikes(id="c", skip=-1)]):
        with pytest.raises(InvalidParameter):
            plan.set(bad)
    assert counts(plan) == {"a": 1, "b": 0}
    plan.set([Strikes(id="a")])
    assert counts(plan) == {"a": 0}


def test_every_fake_s_faults_have_windows_and_chances() -> None:
    now_ms = [0.0]
    plan: Plan[Strikes] = Plan(lambda: now_ms[0])
    plan.set(
        [Strikes(id="window", from_ms=5, until_ms=7, count=9), Strikes(id="half", count=99, probability=0.5, seed=1)]
    )
    struck: list[str | None] = []
    for ms in range(40):
        now_ms[0] = ms
        _, main, _ = plan.meet()
        struck.append(main.id if main else None)
    assert [at for at, name in enumerate(struck) if name == "window"] == [5, 6]
    assert 8 < struck.count("half") < 32
    for bad in (Strikes(id="f", probability=0.0), Strikes(id="f", from_ms=3, until_ms=3), Strikes(id="f", from_ms=-1)):
        with pytest.raises(InvalidParameter, match="fault f"):
            plan.add(bad)

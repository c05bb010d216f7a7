"""The scheduler alone: who goes on, what time it is, and that a record repeats it."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.simulator.virtual.scheduler import (
    EPOCH_NS,
    SECOND_NS,
    PctPolicy,
    Policy,
    RandomPolicy,
    RankClock,
    ReplayPolicy,
    RoundRobinPolicy,
    ScheduleDiverged,
    Scheduler,
    SearchPolicy,
    preemption_bounded,
    varied,
)

POLICIES = [RandomPolicy, PctPolicy, varied]


def counting(policy: Policy, tasks: int = 3, rounds: int = 4) -> tuple[list[str], Scheduler]:
    """Tasks that say their name at each of their points."""
    scheduler = Scheduler(policy, [RankClock()])
    said: list[str] = []

    def run(name: str) -> None:
        for _ in range(rounds):
            said.append(name)
            scheduler.point()

    for index in range(tasks):
        scheduler.spawn(functools.partial(run, f"t{index}"), f"t{index}", 0)
    scheduler.run()
    return said, scheduler


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_decides_everything(policy) -> None:
    orders = {tuple(counting(policy(seed))[0]) for seed in range(20)}
    assert len(orders) > 3
    assert all(counting(policy(seed))[0] == counting(policy(seed))[0] for seed in range(20))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_record_repeats_the_run(policy) -> None:
    for seed in range(10):
        said, scheduler = counting(policy(seed))
        again, second = counting(ReplayPolicy(scheduler.schedule))
        assert again == said
        assert second.schedule == scheduler.schedule


def test_a_record_of_another_run_is_refused() -> None:
    _, scheduler = counting(RandomPolicy(1), tasks=3)
    with pytest.raises(ScheduleDiverged, match="choice 2 of the recorded schedule is 7, not in 0 to 2"):
        counting(ReplayPolicy([1, 7, *scheduler.schedule[2:]]))
    with pytest.raises(ScheduleDiverged, match="ends after 2 choices"):
        counting(ReplayPolicy(scheduler.schedule[:2]))


def test_round_robin_leaves_a_running_task_alone() -> None:
    assert counting(RoundRobinPolicy())[0] == ["t0"] * 4 + ["t1"] * 4 + ["t2"] * 4


@given(st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=8), st.integers(0, 2**32))
def test_sleepers_wake_in_the_order_of_their_time(delays: list[float], seed: int) -> None:
    scheduler = Scheduler(RandomPolicy(seed, warp=0.0), [RankClock()])
    woken: list[tuple[int, float]] = []

    def run(delay: float) -> None:
        began_ns = scheduler.now_ns
        scheduler.sleep(delay)
        woken.append((scheduler.now_ns, delay))
        assert scheduler.now_ns - began_ns >= delay * SECOND_NS - 1

    for delay in delays:
        scheduler.spawn(functools.partial(run, delay), "sleeper", 0)
    scheduler.run()
    assert len(woken) == len(delays)
    # Those whose times differ by more than the points of the others take.
    apart = 1e-4
    for (_, first), (_, second) in itertools.pairwise(woken):
        assert first <= second + apart


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**12),
            st.sampled_from(["shift", "drift", "freeze", "read"]),
            st.floats(-1e5, 1e5, allow_nan=False),
        ),
        max_size=20,
    )
)
def test_monotonic_clocks_never_go_back_and_wall_clocks_move_as_told(changes) -> None:
    clock, now_ns, last_ns, shifted_s = RankClock(), 0, 0, 0.0
    drifted = frozen = False
    for passed_ns, what, amount in changes:
        now_ns += passed_ns
        assert clock.monotonic_ns(now_ns) >= last_ns
        last_ns = clock.monotonic_ns(now_ns)
        before_ns = clock.wall_ns(now_ns)
        if what == "shift":
            clock.shift(amount)
            shifted_s += amount
            assert clock.wall_ns(now_ns) - before_ns == pytest.approx(amount * SECOND_NS, abs=2)
        elif what == "drift":
            clock.set_drift(amount, now_ns)
            drifted = True
            assert clock.wall_ns(now_ns) == before_ns
        elif what == "freeze":
            clock.freeze(now_ns)
            frozen = True
            assert clock.wall_ns(now_ns) == before_ns == clock.wall_ns(now_ns + SECOND_NS)
    if not drifted and not frozen:
        assert clock.wall_ns(now_ns) - EPOCH_NS - now_ns == pytest.approx(shifted_s * SECOND_NS, abs=50)


@given(st.floats(-500_000, 500_000, allow_nan=False), st.integers(0, 10**13))
def test_a_drifting_clock_sleeps_as_long_as_it_believes(drift_ppm: float, own_ns: int) -> None:
    clock = RankClock(drift_ppm)
    assert clock.elapsed_ns(clock.true_ns(own_ns)) == pytest.approx(own_ns, rel=1e-9, abs=3)


def test_a_deadlock_shows_where_each_task_waits() -> None:
    scheduler = Scheduler(RandomPolicy(0), [RankClock()])

    def waits_for_godot() -> None:
        scheduler.wait("Godot")

    scheduler.spawn(waits_for_godot, "vladimir", 0)
    scheduler.run()
    assert scheduler.stuck == "deadlock"
    [task] = scheduler.waiting()
    assert task.waits_for == "Godot"
    assert "waits_for_godot" in task.stack()
    scheduler.reap()


def test_a_loop_that_never_waits_is_a_livelock() -> None:
    scheduler = Scheduler(RandomPolicy(0), [RankClock()], points_max=1000)

    def spin() -> None:
        while True:
            scheduler.point()

    scheduler.spawn(spin, "spinner", 0)
    scheduler.run()
    assert scheduler.stuck == "livelock"
    scheduler.reap()


def test_a_killed_rank_does_nothing_more() -> None:
    scheduler = Scheduler(RandomPolicy(0), [RankClock(), RankClock()])
    done: list[str] = []

    def victim() -> None:
        try:
            while True:
                scheduler.sleep(1)
        finally:
            done.append("finally")

    def killer() -> None:
        scheduler.sleep(3.5)
        scheduler.kill(0)
        scheduler.sleep(10)
        done.append("after")

    scheduler.spawn(victim, "victim", 0)
    scheduler.spawn(killer, "killer", 1)
    scheduler.run()
    assert done == ["after"]
    assert scheduler.stuck == ""
    scheduler.reap()


def test_a_rank_can_kill_itself() -> None:
    scheduler = Scheduler(RandomPolicy(0), [RankClock()])
    done: list[str] = []

    def run() -> None:
        scheduler.kill(0)
        done.append("never")

    scheduler.spawn(run, "suicide", 0)
    scheduler.run()
    assert done == []
    scheduler.reap()


def racing(policy: Policy, careful: bool) -> bool:
    """Two tasks that add one to a number, in two steps unless they are careful; whether the sum is right."""
    scheduler = Scheduler(policy, [RankClock()])
    total = [0]

    def add() -> None:
        scheduler.point()
        if careful:
            total[0] += 1
        else:
            seen = total[0]
            scheduler.point()
            total[0] = seen + 1
        scheduler.point()

    scheduler.spawn(add, "a", 0)
    scheduler.spawn(add, "b", 0)
    scheduler.run()
    return total[0] == 2


def test_systematic_search_finds_a_race_with_one_preemption() -> None:
    found = preemption_bounded(lambda policy: racing(policy, careful=False), bound=2, runs_max=1000)
    assert found is not None
    assert not racing(SearchPolicy(found), careful=False)
    assert preemption_bounded(lambda policy: racing(policy, careful=False), bound=0, runs_max=1000) is None


def test_systematic_search_comes_to_an_end_when_all_is_well() -> None:
    runs = [0]

    def run(policy: SearchPolicy) -> bool:
        runs[0] += 1
        return racing(policy, careful=True)

    assert preemption_bounded(run, bound=2, runs_max=10_000) is None
    assert 2 < runs[0] < 10_000


def test_priorities_find_a_bug_of_depth_two_often() -> None:
    found = sum(not racing(PctPolicy(seed, depth=2, length=8), careful=False) for seed in range(200))
    assert found >= 200 / (2 * 8)  # the guarantee of the paper: 1 / (n k)


@pytest.mark.parametrize("seed", range(20))
def test_a_warp_never_goes_further_than_it_may(seed: int) -> None:
    """A wait that ended leaves its timer behind; the next one may be a deadline far away."""
    scheduler = Scheduler(RandomPolicy(seed, warp=0.5), [RankClock()])
    timed_out: list[bool] = []

    def waits() -> None:
        scheduler.wait("the other", 5_000_000)
        timed_out.append(not scheduler.wait("the other", 60 * SECOND_NS))

    def works() -> None:
        for _ in range(50):
            scheduler.wake(waiter)
            scheduler.point()
        scheduler.wake(waiter)

    waiter = scheduler.spawn(waits, "waits", 0)
    scheduler.spawn(works, "works", 0)
    scheduler.run()
    assert timed_out == [False]
    assert scheduler.now_ns < SECOND_NS

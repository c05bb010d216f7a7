"""How long one scenario takes on ranks that ran another before, on ranks forked for it, and on fresh interpreters.

All run the same scenario on the same machine in this one process, alternating; medians and their ratios are printed,
beside the load of the machine, which the ratios depend on less than the seconds do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import msgspec

from deltaproof.simulator.processes.engine import ProcessEngine
from deltaproof.simulator.scenario import Deadlines, Scenario, Table, Workload

SCENARIO = Scenario(
    name="two-ranks-ten-steps",
    tables=(Table(name="item"), Table(name="user", sharding="table_wise", rank=1)),
    workload=Workload(steps=10),
    deadlines=Deadlines(run_s=600.0),
)


#: Seconds for two ranks and for eight, and the ratio of fresh interpreters to used ranks.
GOAL_S, GOAL_EIGHT_S, GOAL_RATIO = 0.5, 3.0, 12.0


def timed(engine: ProcessEngine, scenario: Scenario = SCENARIO) -> float:
    started = time.perf_counter()
    history = engine.run(scenario)
    assert history.succeeded, [o.error for o in history.outcomes]
    return time.perf_counter() - started


def forked(engine: ProcessEngine) -> float:
    engine.release()
    return timed(engine)


def told(what: str, seconds: list[float], goal_s: float | None = None) -> float:
    median = statistics.median(seconds)
    line = f"{what}: median {median:.2f} s (n={len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f})"
    print(line + ("" if goal_s is None else f"; goal {goal_s:g} s: {'met' if median <= goal_s else 'MISSED'}"))
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs on fresh interpreters; five times as many others")
    rounds = parser.parse_args().rounds
    used: list[float] = []
    fork: list[float] = []
    fresh: list[float] = []
    eight: list[float] = []
    larger = msgspec.structs.replace(SCENARIO, name="eight-ranks-ten-steps", world_size=8)
    with ProcessEngine() as engine, ProcessEngine(start_method="spawn") as spawn:
        # Not measured: the forkserver's imports and both stores' start-up, paid once per session.
        timed(engine)
        spawn.warm_up()
        for _ in range(rounds):
            fork += [forked(engine) for _ in range(5)]
            used += [timed(engine) for _ in range(5)]
            fresh.append(timed(spawn))
            timed(engine, larger)
            eight += [timed(engine, larger) for _ in range(2)]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    a = told("2 ranks, 10 steps, ranks that ran before", used, GOAL_S)
    b = told("2 ranks, 10 steps, ranks forked for the run", fork)
    c = told("2 ranks, 10 steps, fresh interpreters", fresh)
    told("8 ranks, 10 steps, ranks that ran before", eight, GOAL_EIGHT_S)
    met = "met" if c / a >= GOAL_RATIO else "MISSED"
    print(f"of a fresh interpreter's time: used 1/{c / a:.1f} (goal 1/{GOAL_RATIO:g}: {met}), forked 1/{c / b:.1f}")


if __name__ == "__main__":
    main()

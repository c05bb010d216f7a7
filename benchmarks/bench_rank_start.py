"""How long one 2-rank scenario takes on ranks forked from a preloaded server and on freshly spawned interpreters.

Both run the same scenario on the same machine in this one process, alternating; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

from deltaproof.simulator.processes.engine import ProcessEngine
from deltaproof.simulator.scenario import Scenario, Table, Workload

SCENARIO = Scenario(
    name="two-ranks-ten-steps",
    tables=(Table(name="item"), Table(name="user", sharding="table_wise", rank=1)),
    workload=Workload(steps=10),
)


def timed(engine: ProcessEngine) -> float:
    started = time.perf_counter()
    history = engine.run(SCENARIO)
    assert history.succeeded, [o.error for o in history.outcomes]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs on fresh interpreters; five times as many forked")
    rounds = parser.parse_args().rounds
    forked: list[float] = []
    fresh: list[float] = []
    with ProcessEngine() as fork, ProcessEngine(start_method="spawn") as spawn:
        # Not measured: the forkserver's imports and both stores' start-up, paid once per session.
        timed(fork)
        spawn.warm_up()
        for _ in range(rounds):
            forked += [timed(fork) for _ in range(5)]
            fresh.append(timed(spawn))
    a, b = statistics.median(forked), statistics.median(fresh)
    print(f"2 ranks, 10 steps: forked {a:.2f} s (n={len(forked)}), fresh interpreters {b:.2f} s (n={len(fresh)})")
    print(f"ratio forked / fresh: 1/{b / a:.1f}")


if __name__ == "__main__":
    main()

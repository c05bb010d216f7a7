"""Generated scenarios with every fault: the reference holds in each, nothing hangs, and nobody is left behind."""

import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from deltaproof.conformance.check import check, save_failure
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.errors import KitError
from deltaproof.simulator.scenario import Scenario
from deltaproof.simulator.strategies import wide_scenarios

pytestmark = pytest.mark.xdist_group("processes")

#: Scenarios that are drawn from one seed.
BLOCK = 25


@dataclass
class Seen:
    """What came of the runs. ``bad``: what must not have happened, each with a file or a seed to repeat it."""

    verdicts: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    walls_s: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def ours() -> set[tuple[str, int]]:
    """Processes below this one, and the ports that they and this one listen on."""
    me = psutil.Process()
    found = set()
    for process in [me, *me.children(recursive=True)]:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(("process", process.pid))
                listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                found |= {("port", c.laddr.port) for c in listening}
        except psutil.NoSuchProcess:
            continue
    return found


def run_all(engine, count: int, ranks_max: int, seed: int, failures: Path) -> Seen:
    """Runs ``count`` generated scenarios, on and on whatever they come to, and prints a line for each seed."""
    seen = Seen()
    engine.release()
    before, began_s = ours(), time.monotonic()
    for block, at in enumerate(range(0, count, BLOCK)):

        @hypothesis.seed(seed + block)
        @settings(
            max_examples=min(BLOCK, count - at),
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(wide_scenarios(world_size_max=ranks_max, steps_max=8))
        def run(scenario: Scenario) -> None:
            try:
                report = check(engine, scenario)
            except KitError as error:
                seen.verdicts["kit error"] += 1
                seen.bad.append(f"{error}: {scenario.to_json()}")
                return
            seen.verdicts[report.verdict.value] += 1
            seen.walls_s.append(report.history.wall_s)
            seen.struck.update({f.kind for f, n in zip(scenario.faults, report.history.fired, strict=True) if n})
            if report.verdict is Verdict.BROKEN:
                seen.bad.append(f"{save_failure(report, failures)}: {[v.message for v in report.violations]}")

        run()
        engine.release()
        left = ours() - before
        seen.bad += [f"seed {seed + block} left {left}"] if left else []
        told = f"seed {seed + block}: {sum(seen.verdicts.values())} runs, {dict(seen.verdicts)}, {len(seen.bad)} bad"
        print(f"{told}, {time.monotonic() - began_s:.0f} s", flush=True)
    return seen


@pytest.mark.timeout(300)
def test_a_few(engine, tmp_path) -> None:
    seen = run_all(engine, 6, 3, seed=7, failures=tmp_path)
    assert not seen.bad
    assert seen.verdicts["held"] > 0


@pytest.mark.soak
def test_two_thousand(engine) -> None:
    """``DELTAPROOF_SOAK_RUNS`` and ``DELTAPROOF_SOAK_SEED`` (blocks of 25 count on from it) say how many and which."""
    count = int(os.environ.get("DELTAPROOF_SOAK_RUNS", "2000"))
    seed = int(os.environ.get("DELTAPROOF_SOAK_SEED", str(time.time_ns() % 2**31)))
    seen = run_all(engine, count, 8, seed, Path("build") / "soak-failures")
    print(f"{count} generated scenarios, seed {seed}: {dict(seen.verdicts)}")
    print(f"median {statistics.median(seen.walls_s):.2f} s, greatest {max(seen.walls_s):.1f} s")
    print(f"faults that struck, in runs: {dict(seen.struck.most_common())}")
    assert not seen.bad
    assert seen.verdicts["held"] > count / 2

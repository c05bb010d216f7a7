"""What had to be refused stops the attempt that it struck; whoever starts after it may succeed."""

import pytest

from deltaproof.conformance.properties.fails_loudly import fails_loudly
from deltaproof.simulator.faults import StoreSchemaChanged, StoreViewDeleted
from deltaproof.simulator.history import Attempt, RankOutcome
from deltaproof.simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from deltaproof.simulator.virtual.engine import VirtualEngine


@pytest.mark.parametrize("fault", [StoreViewDeleted(skip=3), StoreSchemaChanged(skip=3)], ids=lambda f: f.kind)
def test_a_restart_that_makes_a_lost_view_anew_may_succeed(fault: StoreViewDeleted | StoreSchemaChanged) -> None:
    scenario = Scenario(
        tables=(Table(name="item", rows=60),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=2),
        faults=(fault,),
        restarts=(Restart(),),
    )
    history = VirtualEngine().run(scenario)
    assert not fails_loudly(history).violations
    # The attempt that lost the view may not.
    first = history.attempts[0]
    outcomes = [RankOutcome(rank, "ok", 0) for rank in range(2)]
    history.attempts[0] = Attempt(2, outcomes, begin_ms=first.begin_ms, end_ms=first.end_ms)
    assert [v.message for v in fails_loudly(history).violations] == [
        f"rank {rank} succeeded with what had to be refused" for rank in range(2)
    ]

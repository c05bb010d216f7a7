"""How a scenario's store faults are planned in the fakes (fakes/server/faults.py); a fault's id is its index."""

from __future__ import annotations

from ..fakes.server import faults as fakes
from .errors import KitError
from .faults import StoreError, StorePartial, StoreReset, StoreSlow
from .scenario import Scenario


def planned(scenario: Scenario) -> list[fakes.AnyFault]:
    """The fakes' faults of a scenario, in its order."""
    found: list[fakes.AnyFault] = []
    for index, fault in enumerate(scenario.faults):
        if fault.strikes != "store":
            continue
        if not isinstance(fault, StoreError | StoreReset | StoreSlow | StorePartial):
            raise KitError(f"no way to plan {fault.kind} in the store")
        rank = fault.rank
        common = {
            "id": str(index),
            "route": fault.route,
            "client": None if rank is None else f"rank{rank}",
            "skip": fault.skip,
            "count": fault.count,
        }
        if isinstance(fault, StoreSlow):
            found.append(fakes.DelayFault(delay_ms=fault.delay_ms, **common))
        elif isinstance(fault, StorePartial):
            found.append(fakes.PartialFault(rows_failed=fault.rows_failed, **common))
        elif isinstance(fault, StoreReset):
            found.append(fakes.ResetFault(when="after-commit" if fault.commit else "before-commit", **common))
        else:
            found.append(
                fakes.StatusFault(
                    code=fault.status,
                    retry_after_s=fault.retry_after_s,
                    when="after-commit" if fault.commit else "before-commit",
                    **common,
                )
            )
    return found

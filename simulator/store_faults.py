"""How a scenario's store faults are planned in the fakes (fakes/server/faults.py); a fault's id is its index."""

from __future__ import annotations

from typing import Any

from ..fakes.server import faults as fakes
from . import faults
from .errors import KitError
from .faults import Fault
from .scenario import Scenario

#: Fault -> what the fakes call it. Fields of equal name mean the same on both sides.
KINDS: dict[type[Fault], type[fakes.Fault]] = {
    faults.StoreError: fakes.StatusFault,
    faults.StoreReset: fakes.ResetFault,
    faults.StoreSlow: fakes.DelayFault,
    faults.StorePartial: fakes.PartialFault,
    faults.StoreTruncated: fakes.TruncateFault,
    faults.StoreSlowBody: fakes.SlowBodyFault,
    faults.StoreDuplicated: fakes.DuplicateFault,
    faults.StoreReordered: fakes.ReorderFault,
    faults.StoreOutage: fakes.OutageFault,
    faults.StoreViewDeleted: fakes.ViewDeletedFault,
    faults.StoreSchemaChanged: fakes.SchemaChangedFault,
    faults.StoreTokenRevoked: fakes.TokenRevokedFault,
}


def planned(scenario: Scenario) -> list[fakes.AnyFault]:
    """The fakes' faults of a scenario, in its order. A rank's client is called ``rank0``, ``rank1``, …"""
    return [_planned(index, fault) for index, fault in enumerate(scenario.faults) if fault.strikes == "store"]


def _planned(index: int, fault: Fault) -> Any:
    if type(fault) not in KINDS:
        raise KitError(f"no way to plan {fault.kind} in the store")
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__}
    rank = fields.pop("rank")
    if "commit" in fields:
        fields["when"] = "after-commit" if fields.pop("commit") else "before-commit"
    if "status" in fields:
        fields["code"] = fields.pop("status")
    return KINDS[type(fault)](id=str(index), client=None if rank is None else f"rank{rank}", **fields)

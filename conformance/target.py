"""What a target is, for who writes one. docs/conformance.md goes through it.

A target is a callable that takes a `RankContext` and returns an `Uploader` or a `Publisher`, named as
``package.module:factory``; or a program that speaks docs/protocol.md, named as ``exec:COMMAND``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from ..simulator.errors import ScenarioError
from ..simulator.faults import LeakyError, RankKill, RankRaise, StoreTokenRevoked
from ..simulator.scenario import Scenario
from ..simulator.seams import CAPABILITIES, check_factory, claimed, claims, seam_of
from ..simulator.target import PublisherTarget as Publisher
from ..simulator.target import RankContext, is_ours, resolve
from ..simulator.target import UploaderTarget as Uploader

__all__ = [
    "CAPABILITIES",
    "Publisher",
    "RankContext",
    "Uploader",
    "capabilities",
    "check_factory",
    "claims",
    "default_engine",
    "missing",
    "needs",
    "seam_of",
]


def capabilities(target: str) -> frozenset[str]:
    """What a target claims. Raises ScenarioError for one that cannot be found, or that claims what there is not."""
    return frozenset(CAPABILITIES) if is_ours(target) else claimed(resolve(target), target)


def default_engine(target: str) -> str:
    """The engine that a target is best asked on: ``virtual``, but ``processes`` for programs, whose time is not ours to
    command, and where torch is installed for whatever may be a publisher, which wants a TorchRec model.

    Raises ScenarioError for a target that cannot be found.
    """
    if target.startswith("exec:"):
        return "processes"
    if is_ours(target) or seam_of(resolve(target)) == "uploader":
        return "virtual"
    return "processes" if all(map(find_spec, ("torch", "torchrec"))) else "virtual"


def needs(scenario: Scenario) -> dict[str, str]:
    """Capability -> what in the scenario asks for it."""
    config, found = scenario.publisher, dict[str, str]()
    for fault in scenario.faults:
        at_sdk = isinstance(fault, RankKill | RankRaise) and fault.point.startswith("sdk.")
        if isinstance(fault, LeakyError) or at_sdk:
            found["sdk"] = f"the fault {fault.kind}, which strikes in the store's client"
        elif fault.family == "store" or isinstance(fault, StoreTokenRevoked):
            found["feature-store"] = f"the fault {fault.kind}, which strikes in the fake Feature Store"
    found[config.upload_format] = f"upload_format {config.upload_format}"
    for name, asked in {
        "int8": config.embedding_type == "int8",
        "minutes": config.every_minutes is not None,
        "role-names": config.naming == "role",
        "dynamic": any(table.sharding == "dynamic" for table in scenario.tables),
        "retain": config.retain,
        "spill": config.spill,
        "readback": config.readback,
        "restart": bool(scenario.restarts or scenario.workload.checkpoint_every_steps),
    }.items():
        if asked:
            found[name] = CAPABILITIES[name].split(" when ")[0]
    return found


def missing(target: str, engine: str) -> Callable[[Scenario], str | None]:
    """Says of a scenario why the target cannot be asked it on the engine, in words; None when it can.

    Raises ScenarioError for a target that cannot be found, or cannot run on that engine at all.
    """
    if engine == "virtual" and target.startswith("exec:"):
        raise ScenarioError(f"{target}: a program runs in real time: use the process engine (--engine processes)")
    has = capabilities(target)
    lacks: Callable[[Scenario], str | None] = lambda scenario: None  # noqa: E731
    if engine == "virtual":
        from ..simulator.virtual.engine import lacks

    def why(scenario: Scenario) -> str | None:
        for name, what in needs(scenario).items():
            if name not in has:
                return f"the target does not claim {name!r}: {what}"
        if target.startswith("exec:") and any(fault.family == "clock" for fault in scenario.faults):
            return "a clock fault shifts the clocks of the rank's process, and the program reads its own"
        lacking = lacks(scenario)
        return None if lacking is None else f"the engine {engine} has {lacking}"

    return why

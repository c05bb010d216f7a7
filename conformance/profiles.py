"""Profiles: how much a target is asked. ``smoke`` takes a minute, ``ci`` ten, ``nightly`` hours.

A profile is a list of scenarios: those of the demo, those in which each known bug shows, and generated ones of every
kind of fault. The same profile, engine and seed give the same list.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..simulator.catalogue import demo_scenarios
from ..simulator.errors import ScenarioError
from ..simulator.explore import explore
from ..simulator.scenario import Scenario
from ..simulator.strategies import wide_scenarios
from ..simulator.target import is_ours
from .specimens import SPECIMENS
from .target import capabilities


@dataclass(frozen=True)
class Profile:
    """How many there are of what, by engine: the virtual one is some twenty times as fast.

    ``known_bugs``: scenarios in which a known bug shows, each from so many seeds, because some need a certain order of
    events; 0: one for each fault family that is not there yet. ``generated``: others.
    """

    known_bugs: dict[str, int]
    generated: dict[str, int]


PROFILES: dict[str, Profile] = {
    "smoke": Profile({"virtual": 0, "processes": 0}, {"virtual": 60, "processes": 0}),
    "ci": Profile({"virtual": 4, "processes": 1}, {"virtual": 500, "processes": 100}),
    "nightly": Profile({"virtual": 20, "processes": 5}, {"virtual": 5000, "processes": 2000}),
}


def plan(profile: str, engine: str, seed: int, target: str = "reference") -> list[Scenario]:
    """The scenarios of a profile, each with a name of its own, the calmest first.

    They are fitted to what ``target`` claims, as far as that leaves them what they are.

    Raises ScenarioError for an unknown profile, engine or target.
    """
    if profile not in PROFILES:
        raise ScenarioError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
    if engine not in chosen.generated:
        raise ScenarioError(f"unknown engine {engine!r}; known: {', '.join(chosen.generated)}")
    found = demo_scenarios(seed=2026 + seed)
    families = {fault.family for scenario in found for fault in scenario.faults}
    for specimen in SPECIMENS.values():
        if chosen.known_bugs[engine] or specimen.family not in families:
            families.add(specimen.family)
            found.append(specimen.scenario)
    for number in range(2, chosen.known_bugs[engine] + 1):
        for specimen in SPECIMENS.values():
            name, again = f"{specimen.scenario.name}-{number}", specimen.scenario.seed + 1000 * (seed + 1) * number
            found.append(msgspec.structs.replace(specimen.scenario, name=name, seed=again))
    found += generated(chosen.generated[engine], seed)
    return found if is_ours(target) else [_fitted(scenario, capabilities(target)) for scenario in found]


def generated(count: int, seed: int) -> list[Scenario]:
    """Scenarios drawn from a seed, ``generated-0001`` and so on; fewer than ``count`` only if no more can be drawn."""
    found: list[Scenario] = []

    def draw(scenario: Scenario, shrinking: bool) -> bool:
        found.append(msgspec.structs.replace(scenario, name=f"generated-{len(found) + 1:04d}"))
        return True

    explore(draw, wide_scenarios(), count=count, seed=seed)
    return found


def _fitted(scenario: Scenario, has: frozenset[str]) -> Scenario:
    """The scenario without what a target that does not claim it need not be asked for the sake of the rest: the other
    upload_format, int8, and copies where no fault strikes the disk."""
    publisher, formats = scenario.publisher, has & {"arrow", "json"}
    if len(formats) == 1:
        publisher = msgspec.structs.replace(publisher, upload_format=next(iter(formats)))
    if "int8" not in has:
        publisher = msgspec.structs.replace(publisher, embedding_type="float32")
    if not any(fault.family == "disk" for fault in scenario.faults):
        retain, spill = publisher.retain and "retain" in has, publisher.spill and "spill" in has
        readback = publisher.readback and retain and "readback" in has
        publisher = msgspec.structs.replace(publisher, retain=retain, spill=spill, readback=readback)
    return msgspec.structs.replace(scenario, publisher=publisher)

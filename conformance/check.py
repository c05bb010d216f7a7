"""Run a scenario and judge it; keep what failed in a file that ``deltaproof replay`` repeats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..simulator.errors import ScenarioError, SimulatorError
from ..simulator.history import History
from ..simulator.recorded import slug
from ..simulator.scenario import Scenario
from .judge import judge
from .verdict import Report

#: The version of failure files this package writes and the newest it reads.
FAILURE_VERSION = 1


class Engine(Protocol):
    """What runs a scenario and returns what was observed."""

    def run(self, scenario: Scenario, target: str = "reference") -> History: ...


def check(engine: Engine, scenario: Scenario, target: str = "reference") -> Report:
    """Run ``scenario`` on ``engine`` and judge the history. Raises ScenarioError (bad input) and KitError."""
    return judge(engine.run(scenario, target))


def check_smaller(engine: Engine, scenario: Scenario, target: str) -> Report | None:
    """As `check`, for one of the many scenarios that are tried to make a failing one smaller; None where it cannot be
    run."""
    try:
        return check(engine, scenario, target)
    except SimulatorError:
        return None


@dataclass(frozen=True)
class Saved:
    """A scenario to run, with the target and the broken properties when it comes from a failure file."""

    scenario: Scenario
    target: str = "reference"
    broken: tuple[str, ...] = ()


def save_failure(report: Report, folder: Path) -> Path:
    """Write a failure file for a report with broken properties; its name tells the scenario, target and seed."""
    history = report.history
    broken = [f.property for f in report.findings if f.violations]
    content = {
        "deltaproof_failure": FAILURE_VERSION,
        "target": history.target,
        "broken": broken,
        "first_violations": [v.message for v in report.violations[:5]],
        "scenario": json.loads(history.scenario.to_json()),
    }
    name = slug(f"{history.scenario.name}-{history.target}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # The digest keeps two scenarios of one name and seed apart.
    digest = hashlib.sha256(history.scenario.to_json().encode()).hexdigest()[:6]
    path = folder / f"{name}-{history.scenario.seed}-{digest}.json"
    path.write_text(text)
    return path


def load(path: Path) -> Saved:
    """Read a scenario file or a failure file. Raises ScenarioError with one line for a person."""
    try:
        raw: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raw = None  # Scenario.load says what is wrong
    if not isinstance(raw, dict) or "deltaproof_failure" not in raw:
        return Saved(Scenario.load(path))
    version = raw["deltaproof_failure"]
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= FAILURE_VERSION:
        raise ScenarioError(
            f"{path}: failure file version {version!r} is not one this deltaproof reads ({FAILURE_VERSION})"
        )
    target, broken = raw.get("target"), raw.get("broken")
    if not isinstance(target, str) or not isinstance(broken, list) or not all(isinstance(b, str) for b in broken):
        raise ScenarioError(f"{path}: a failure file needs a text 'target' and a list 'broken' of property names")
    return Saved(Scenario.from_json(json.dumps(raw.get("scenario")), where=str(path)), target, tuple(broken))

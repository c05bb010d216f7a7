"""The simulator's errors.

    SimulatorError
    ├── ScenarioError   bad input or environment: the run never started (exit code 2)
    └── KitError        the harness itself failed: nothing is known about the target (exit code 4)

A target's bug is neither: it is a violation in a report.
"""

from __future__ import annotations


class SimulatorError(Exception):
    """Base of both."""


class ScenarioError(SimulatorError, ValueError):
    """A scenario that cannot be run: bad input or a missing package, never a finding about a target."""


class KitError(SimulatorError, RuntimeError):
    """The harness itself failed. Usual causes: no memory, no disk, a fake store that could not start or died."""

import sys
from pathlib import Path

import pytest

from deltaproof.simulator.processes.engine import ProcessEngine


@pytest.fixture(scope="session")
def engine():
    """One engine for all tests of a worker: its forkserver takes seconds to start, a scenario under one."""
    # Ranks take over sys.path, so they find the targets of the tests.
    sys.path.insert(0, str(Path(__file__).parent))
    with ProcessEngine() as running:
        running.warm_up()
        yield running
    sys.path.remove(str(Path(__file__).parent))

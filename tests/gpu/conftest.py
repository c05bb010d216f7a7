import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def targets_are_importable():
    """Ranks take over sys.path, so they find the targets of these tests."""
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))

"""What every test gets: no credentials or proxies of the machine, no network but loopback, bounded Hypothesis runs."""

import gc
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from deltaproof.simulator.processes.engine import ProcessEngine

# At import, not in a fixture: alibabacloud_credentials reads some of these when it is imported. A developer's real
# credentials must never reach a test, and the lookup of the machine's own role would leave the machine.
for name in list(os.environ):
    if name.startswith(("ALIBABA_CLOUD_", "FEATUREDB_", "AWS_")) or name.lower().endswith("_proxy"):
        del os.environ[name]
os.environ["ALIBABA_CLOUD_ECS_METADATA_DISABLED"] = "true"
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"

# derandomize: what is red in CI is red here too. No deadline: the cores may be shared.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, print_blob=True)
# HYPOTHESIS_PROFILE=search draws other examples on each run.
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
# HYPOTHESIS_PROFILE=mutants (ci/mutants.py): whether a test is red, not why.
hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("suite"),
    max_examples=50,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    report_multiple_bugs=False,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def _refuse_the_world(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: raises when this process connects or sends to an address that is not its own machine's."""
    if event not in ("socket.connect", "socket.sendto") or not isinstance(args[1], tuple):
        return
    host = args[1][0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
        is_local = address.is_loopback or address.is_unspecified
    except ValueError:
        is_local = host in ("localhost", "")
    if not is_local:
        raise PermissionError(f"a test reaches out to {host!r}: tests talk to loopback only")


# Somebody who names a scratch project of the real service (tests/fakes/test_parity.py) wants it reached.
if "DELTAPROOF_REAL_PROJECT" not in os.environ:
    sys.addaudithook(_refuse_the_world)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first: one that a worker begins late keeps the suite waiting when all else is done."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop with one line when GPU tests were asked for where there is no GPU: skipping them would look like success."""
    if any(item.get_closest_marker("gpu") for item in session.items):
        try:
            import torch

            found = torch.cuda.is_available()
        except ImportError:
            found = False
        if not found:
            pytest.exit("tests marked gpu were selected, and torch finds no CUDA device here", returncode=2)


#: File descriptors that a module's tests may leave open: caches of libraries, not one per test or example.
DESCRIPTORS_LEFT_MAX = 32


def _descriptors() -> int:
    # Alibaba's client keeps an HTTP session for each endpoint it has ever talked to.
    if core := sys.modules.get("darabonba.core"):
        while core.DaraCore._sessions:
            core.DaraCore._sessions.popitem()[1].close()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def descriptors_are_closed() -> Iterator[None]:
    """No module leaves open what its tests opened: many thousand tests run in one process."""
    before = _descriptors()
    yield
    left = _descriptors() - before
    assert left <= DESCRIPTORS_LEFT_MAX, f"this module's tests left {left} file descriptors open"


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that nothing listens on; for tests that must name a port before anything opens it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def engine() -> Iterator["ProcessEngine"]:
    """One process engine for all tests of a worker: its forkserver takes seconds to start, a scenario under one.

    Tests that use it are in a few xdist groups, each of which one worker runs.
    """
    from deltaproof.simulator.processes.engine import ProcessEngine

    with ProcessEngine() as running:
        running.warm_up()
        yield running

"""docs/feature-store.md says what the code does: its tables are compared with the code's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from deltaproof.fakes.errors import ERRORS
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import ROUTES, AnyFault, Fault
from deltaproof.fakes.server.routes import GROUPS
from deltaproof.fakes.server.signature import NONCES_MAX, WINDOW_S
from deltaproof.fakes.server.state import REQUESTS_MAX
from deltaproof.fakes.store import ViewSpec

PAGE = (Path(__file__).parents[2] / "docs" / "feature-store.md").read_text()


def _routes_of_the_page() -> set[tuple[str, str]]:
    found = set()
    for methods, path in re.findall(r"^\| ([A-Z, ]+) `([^`]+)` \|", PAGE, re.M):
        whole = path.replace("…", "/api/v1/instances").replace("{t}", "/api/v1/tables/{db}/{schema}/{table}")
        found |= {(method, whole) for method in methods.split(", ")}
    return found


def test_every_route_is_described_and_no_other() -> None:
    served = {(method, path) for routes in GROUPS.values() for method, path, *_ in routes}
    assert _routes_of_the_page() == served


def test_the_error_table_is_the_code_s() -> None:
    for row in ERRORS.values():
        retriable = "yes" if row.retriable else "no"
        line = f"| `{row.code}` | {row.status or '-'} | {row.applied} | {retriable} | {row.meaning} |"
        assert line in PAGE, f"docs/feature-store.md lacks this line:\n{line}"
    listed = re.findall(r"^\| `([\w.]+)` \| [\d-]+ \|", PAGE, re.M)
    assert listed == list(ERRORS)


def test_the_limits_are_the_code_s() -> None:
    assert f"more than {WINDOW_S / 60:g} minutes off" in PAGE
    assert f"the last {NONCES_MAX:,} are remembered" in PAGE
    assert f"the last {REQUESTS_MAX:,} requests" in PAGE


def test_every_kind_of_fault_is_described_with_its_fields() -> None:
    shared = [field.name for field in msgspec.structs.fields(Fault)]
    listed = {
        kind: re.findall(r"`(\w+)`", fields) for kind, fields in re.findall(r"^\| `([a-z-]+)` \|([^|]*)\|", PAGE, re.M)
    }
    assert listed == {
        kind.__struct_config__.tag: [field.name for field in msgspec.structs.fields(kind) if field.name not in shared]
        for kind in get_args(AnyFault)
    }
    assert all(f"`{name}`" in PAGE for name in (*shared, *ROUTES))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_request_by_hand_is_one() -> None:
    with FeatureStoreServer() as server:
        server.store.create_view(ViewSpec("deltaproof", "embeddings", "entity"))
        shown = re.search(r"(\$ T=http://127.*?)\n(\{.*?\})\n", PAGE, re.S)
        fault = re.search(r"\$ (curl -X PUT .*)", PAGE)
        assert shown is not None
        assert fault is not None
        commands = f"{shown[1]}\n{fault[1]}".replace("$ ", "").replace(":8080", f":{server.port}")
        done = subprocess.run(["bash", "-ec", commands], capture_output=True, text=True, timeout=30, check=True)
        replies = [json.loads(text) for text in re.findall(r"\{.*?\}", done.stdout)]
        assert [reply.keys() for reply in replies] == [json.loads(shown[2]).keys(), {"RequestId", "Count"}]
        assert server.store.lookup("deltaproof", "embeddings", "v1", ["item"], [7]).num_rows == 1
        assert [entry.fault.id for entry in server.faults()] == ["busy"]

"""docs/feature-store.md says what the code does: its tables are compared with the code's."""

from __future__ import annotations

import re
from pathlib import Path

from deltaproof.fakes.errors import ERRORS
from deltaproof.fakes.server.routes import GROUPS
from deltaproof.fakes.server.signature import NONCES_MAX, WINDOW_S

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

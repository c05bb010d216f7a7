"""The page at /: shows the store, the faults and the last writes; says no secret, loads nothing, escapes everything."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest
import urllib3

from deltaproof.fakes.durable import DurableStore
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import StatusFault, TokenRevokedFault
from deltaproof.fakes.store import Store, ViewSpec

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

HOSTILE = "<script>alert('1')</script>&\"x"


class Reader(html.parser.HTMLParser):
    """Text of the cells by row, every tag, every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1] and self.lasttag in ("td", "th"):
            self.rows[-1][-1] += data.strip()


def read(raw: Raw) -> tuple[Reader, str]:
    reply = raw("GET", "/")
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    text = reply.data.decode()
    reader = Reader()
    reader.feed(text)
    return reader, text


def test_an_empty_server_says_so(raw: Raw) -> None:
    reader, _ = read(raw)
    for phrase in (
        "No views yet.",
        f"Projects without views: {PROJECT}",
        "No faults",
        "No writes yet.",
        "in memory only",
    ):
        assert phrase in reader.text


def test_it_shows_views_versions_rows_faults_and_writes(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.create_view(ViewSpec("other", "bytes", "things", value_type="uint8", ttl_s=0))
    server.add_fault(StatusFault(id="f1", code=503, skip=1))
    server.add_fault(StatusFault(id="f2", route="scan", client="rank7", count=3))
    for version in ("v1", "v2"):
        raw.data("POST", f"/write_arrow?version={version}&ts=77", ipc(rows(["t"] * 2, [1, 2], [[1.0]] * 2)))
    reader, _ = read(raw)
    assert [PROJECT, VIEW, "float32", "1296000", "v1", "2", "77"] in reader.rows
    assert ["other", "bytes", "uint8", "never", "none", "0", ""] in reader.rows
    assert not [row for row in reader.rows if row[4:5] == ["v2"]]
    assert ["f1", "status", "write", "any", "2", "1", "1", "done"] in reader.rows
    assert ["f2", "status", "scan", "rank7", "0", "0", "3", "active"] in reader.rows
    writes = [row[1:] for row in reader.rows if "write_arrow" in row]
    assert writes == [
        ["rank0", "write_arrow", "v2", "77", "2", "0", "503 ServiceUnavailable", "f1"],
        ["rank0", "write_arrow", "v1", "77", "2", "2", "200", ""],
    ]


def test_what_clients_choose_is_escaped(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version=HOSTILE, ts=5)
    server.add_fault(StatusFault(id=HOSTILE, client=HOSTILE))
    login = urllib3.util.make_headers(basic_auth=f"{HOSTILE}:x")["authorization"].removeprefix("Basic ")
    raw.data("POST", f"/write_arrow?version={VERSION}&ts=7", ipc(rows(["t"], [1], [[1.0]])), Auth=login)
    reader, text = read(raw)
    assert reader.tags.isdisjoint({"script", "img", "link", "iframe", "form", "a", "object"})
    assert HOSTILE not in text
    assert reader.text.count(HOSTILE) == 5  # version, fault and its client, writer, struck by


def test_it_holds_no_secret_and_loads_nothing(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    raw.data("POST", f"/write_arrow?version={VERSION}&ts=7", ipc(rows(["t"], [1], [[1.0]])))
    server.add_fault(TokenRevokedFault(id="revoked"))
    raw.data("POST", f"/write_arrow?version={VERSION}&ts=7", ipc(rows(["t"], [1], [[1.0]])))
    reader, text = read(raw)
    for secret in (raw.login["Authorization"], server.state.token, raw.login["Auth"], "password"):
        assert secret not in text
    assert reader.attributes.isdisjoint({"src", "href", "onclick", "onload", "action", "style"})
    assert not re.search(r"url\(|@import|https?:|//", text)
    policy = raw("GET", "/").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_it_only_reads(server: FeatureStoreServer, raw: Raw) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert raw(method, "/").status == 405
    server.add_fault(StatusFault(id="any", route="*", count=9))
    before = json.loads(raw("GET", "/_admin/faults").data)["Faults"]
    read(raw)
    assert json.loads(raw("GET", "/_admin/faults").data)["Faults"] == before
    assert [entry for entry in server.requests() if entry.route == "status_page"] == []


def test_a_kept_store_is_named_as_kept_and_not_where(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store, FeatureStoreServer(store=store) as server:
        text = urllib3.request("GET", f"http://{server.endpoint}/", timeout=10).data.decode()
    assert "kept over a restart" in text
    assert str(tmp_path) not in text


def test_many_views_make_no_endless_page(server: FeatureStoreServer, raw: Raw) -> None:
    for number in range(230):
        server.store.create_view(ViewSpec(PROJECT, f"view{number}", "entity"))
    reader, _ = read(raw)
    assert sum(PROJECT in row for row in reader.rows) == 200
    assert "more" in reader.text


def test_versions_that_are_not_shown_are_not_counted_through(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_view(server.store)
    for number in range(230):
        server.store.write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version=f"version{number}", ts=1)
    looked_at: list[str] = []
    count = Store.rows

    def counted(store: Store, project: str, view: str, version: str) -> int:
        looked_at.append(version)
        return count(store, project, view, version)

    monkeypatch.setattr(Store, "rows", counted)
    reader, _ = read(raw)
    assert sum(PROJECT in row for row in reader.rows) == 200
    assert "and 30 more" in reader.text
    assert len(looked_at) == 200


@pytest.mark.parametrize("remote", ["203.0.113.7", None])
def test_it_answers_on_loopback_only(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch, remote: str | None
) -> None:
    from aiohttp import web

    monkeypatch.setattr(web.BaseRequest, "remote", property(lambda _: remote))
    assert raw("GET", "/").status == 403

"""The real OpenAPI client's own requests, sent again to the byte; wrong credentials and clocks; names in any script."""

from __future__ import annotations

import json
import re
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
from alibabacloud_paifeaturestore20230621 import models
from alibabacloud_paifeaturestore20230621.client import Client
from alibabacloud_tea_openapi.exceptions import ClientException
from alibabacloud_tea_openapi.utils import Utils
from alibabacloud_tea_openapi.utils_models import Config, GlobalParameters

from deltaproof.fakes.credentials import TokenVault
from deltaproof.fakes.errors import ERRORS, InvalidParameter
from deltaproof.fakes.feature_store_py import FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.signature import sign
from deltaproof.fakes.server.state import CLIENT_HEADER, INSTANCE_ID

from .kit import PROJECT, VERSION, Raw, make_view
from .test_docs import PAGE

WAIT_S = 20.0


class Relay:
    """Between a client and the server: passes bytes on, both ways, and notes each connection's request.

    With ``hold`` it passes nothing on.
    """

    def __init__(self, server: FeatureStoreServer) -> None:
        self._port = server.port
        self.hold = False
        self.sent: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(("127.0.0.1", self._port), timeout=WAIT_S) as server:
                    self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        sent = b""
        with selectors.DefaultSelector() as selector:
            for sock in (client, server):
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(WAIT_S):
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is server:
                        client.sendall(data)
                        continue
                    sent += data
                    if is_whole(sent):
                        self.sent.append(sent)
                        if self.hold:
                            return
                    if not self.hold:
                        server.sendall(data)


def is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return bool(end) and len(body) == (int(length[1]) if length else 0)


def send(server: FeatureStoreServer, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the reply to exactly these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(request)
        received = b""
        while not is_whole(received):
            chunk = sock.recv(65536)
            assert chunk, received
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.fixture
def relay(server: FeatureStoreServer) -> Iterator[Relay]:
    with Relay(server) as running:
        yield running


def openapi(endpoint: str, key: str = "deltaproof", secret: str = "deltaproof", **more: Any) -> Client:
    config = Config(access_key_id=key, access_key_secret=secret, region_id="cn-x", endpoint=endpoint, protocol="HTTP")
    for name, value in {"read_timeout": 20_000, **more}.items():
        setattr(config, name, value)
    return Client(config)


def list_instances(client: Client) -> Any:
    return client.list_instances(models.ListInstancesRequest(status="Running")).body


def create_project(client: Client, name: str = "second") -> Any:
    return client.create_project(INSTANCE_ID, models.CreateProjectRequest(name=name)).body


ACTS: dict[str, Callable[[Client], Any]] = {"GET": list_instances, "POST": create_project}


@pytest.mark.parametrize("method", sorted(ACTS))
def test_the_very_request_that_the_client_sent_is_refused_when_it_comes_again(
    server: FeatureStoreServer, relay: Relay, method: str
) -> None:
    client = openapi(relay.endpoint)
    ACTS[method](client)
    (request,) = relay.sent
    assert request.startswith(method.encode())
    projects = server.store.projects()
    for _ in range(2):
        status, error = send(server, request)
        assert (status, error["Code"]) == (400, "SignatureNonceUsed")
    server.reset()  # which forgets everything else
    status, error = send(server, request)
    assert (status, error["Code"]) == (400, "SignatureNonceUsed")
    assert server.store.projects() == [PROJECT]
    assert len(projects) == (2 if method == "POST" else 1)
    assert server.requests()[-1].code == "SignatureNonceUsed"
    ACTS[method](openapi(server.endpoint))  # signed anew it is another request


def test_of_many_copies_at_once_one_is_accepted(server: FeatureStoreServer, relay: Relay) -> None:
    relay.hold = True
    with pytest.raises(Exception, match=r"(?i)connection|remote"):
        create_project(openapi(relay.endpoint))
    request = relay.sent[0]
    found: list[str] = []

    def work() -> None:
        status, body = send(server, request)
        found.append("accepted" if status == 200 else body["Code"])

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == ["SignatureNonceUsed"] * 15 + ["accepted"]
    assert server.store.projects() == [PROJECT, "second"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"POST", b"PUT"),
        (b"/projects", b"/featureentities"),
        (b"second", b"third"),
        (b"x-acs-action: CreateProject", b"x-acs-action: DeleteProject"),
        (b"x-acs-version: 2023", b"x-acs-version: 2024"),
    ],
)
def test_the_client_s_request_changed_on_the_way_is_refused(
    server: FeatureStoreServer, relay: Relay, old: bytes, new: bytes
) -> None:
    relay.hold = True
    with pytest.raises(Exception, match=r"(?i)connection|remote"):
        create_project(openapi(relay.endpoint))
    request = relay.sent[0]
    assert old in request
    changed = request.replace(old, new, 1)
    grown = len(new) - len(old) if old == b"second" else 0
    changed = re.sub(
        rb"(?i)(content-length: *)(\d+)", lambda found: found[1] + b"%d" % (int(found[2]) + grown), changed
    )
    status, error = send(server, changed)
    assert (status, error["Code"]) in ((400, "SignatureDoesNotMatch"), (405, "MethodNotAllowed"))
    assert server.store.projects() == [PROJECT]


# What the issue names, each with the real client, each as the page says


def documented(problem: str) -> str:
    """The code that docs/feature-store.md names for a problem."""
    (code,) = re.findall(rf"^\| [^|]*{re.escape(problem)}[^|]*\| `([\w.]+)`", PAGE, re.M)
    return str(code)


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("wrong secret", {"secret": "wrong"}),
        ("unknown access key", {"key": "STS.wrong"}),
        ("a token of another key", {"security_token": "wrong"}),
        ("a short-lived key without its token", {"security_token": None}),
        ("an expired token", {"lifetime_s": -1.0}),
        ("more than 15 minutes off", {"clock_s": -960}),
        ("more than 15 minutes off", {"clock_s": 960}),
    ],
)
def test_each_refusal_is_the_documented_one(
    problem: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = TokenVault()
    lifetime_s, clock_s = change.pop("lifetime_s", 3600.0), change.pop("clock_s", 0)
    token = vault.issue(lifetime_s)
    good = {"key": token.access_key_id, "secret": token.access_key_secret, "security_token": token.security_token}
    date = datetime.now(UTC) + timedelta(seconds=clock_s)
    monkeypatch.setattr(Utils, "get_timestamp", staticmethod(lambda: date.strftime("%Y-%m-%dT%H:%M:%SZ")))
    with FeatureStoreServer(accounts=vault) as server:
        with pytest.raises(ClientException) as caught:
            list_instances(openapi(server.endpoint, **{**good, **change}))
        assert server.requests()[-1].code == caught.value.code
        assert not any(secret in str(caught.value) for secret in vault.secrets())
    code = documented(problem)
    assert (caught.value.code, caught.value.status_code) == (code, ERRORS[code].status)
    if problem == "an expired token":
        return
    monkeypatch.undo()
    with FeatureStoreServer(accounts=vault) as server:
        assert list_instances(openapi(server.endpoint, **good)).total_count == 1


# The target and the headers


@pytest.mark.parametrize("target", ["?Name=%ff", "?Name=%fe", "?%ed%a0%80=1", "?Name=a#b", "#", "?Name=%C3%28"])
def test_a_target_that_can_be_read_in_two_ways_is_refused(server: FeatureStoreServer, raw: Raw, target: str) -> None:
    path = f"/api/v1/instances/{INSTANCE_ID}/projects"
    signed = raw.signed("GET", path + "?Name=%EF%BF%BD")  # what all invalid bytes are when they are decoded loosely
    head = f"GET {path}{target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    status, error = send(server, head.encode() + b"\r\n")
    assert (status, error["Code"]) == (400, "InvalidParameter")


@pytest.mark.parametrize(
    "path", ["/write_arrow?version=%ff&ts=1", "/high_water_ts?version=%c3", "/high_water_ts?version=v1#"]
)
def test_the_data_plane_refuses_such_targets_too(server: FeatureStoreServer, raw: Raw, path: str) -> None:
    make_view(server.store)
    method = "POST" if "write" in path else "GET"
    head = f"{method} {raw.table}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    status, error = send(server, head.encode() + b"\r\n")
    assert (status, error["Code"]) == (400, "InvalidParameter")
    assert server.store.versions(PROJECT, "view") == []


def test_different_targets_have_different_signatures() -> None:
    targets = (
        "/p",
        "/p?",
        "/p?a",
        "/p?a=b",
        "/p?a=%2B",
        "/p?a=+",
        "/p?a=%23",
        "/p#a",
        "//p",
        "/q/../p",
        "/%70",
        "/p?a=%25ff",
    )
    same = {"/p": "/p?", "/p?a": "/p?a="}  # the same to every reader
    signatures = {target: sign("GET", target, {}, "host", "secret") for target in targets}
    assert len(set(signatures.values())) == len(targets) - 1
    for one, other in same.items():
        assert sign("GET", one, {}, "host", "secret") == sign("GET", other, {}, "host", "secret")
    assert sign("GET", "http://any:1/p?a=b", {}, "host", "secret") == signatures["/p?a=b"]
    for bytes_ in ("%ff", "%c3(", "%ed%a0%80"):
        with pytest.raises(InvalidParameter, match="not UTF-8"):
            sign("GET", f"/p?a={bytes_}", {}, "host", "secret")


def test_the_name_of_a_client_must_be_signed(server: FeatureStoreServer, raw: Raw) -> None:
    headers = {**raw.signed("GET", "/api/v1/instances"), CLIENT_HEADER: "somebody-else"}
    reply = raw("GET", "/api/v1/instances", headers=headers)
    assert (reply.status, json.loads(reply.data)["Code"]) == (400, "IncompleteSignature")
    headers = {**raw.signed("GET", "/api/v1/instances", **{CLIENT_HEADER: "rank0"}), CLIENT_HEADER: "rank1"}
    assert json.loads(raw("GET", "/api/v1/instances", headers=headers).data)["Code"] == "SignatureDoesNotMatch"
    client = openapi(server.endpoint, global_parameters=GlobalParameters(headers={CLIENT_HEADER: "rank7"}))
    list_instances(client)  # the real client signs it of itself
    assert server.requests()[-1].client == "rank7"


@pytest.mark.parametrize(
    "name", ["rank0", "a b", "100%", "%41", "ранг-0", "順位", "é\u0301", "\U0001f916", "x" * 256, "ж" * 256]
)
def test_users_may_have_names_in_any_script(server: FeatureStoreServer, name: str) -> None:
    make_view(server.store)
    client = FeatureStoreClient(
        "deltaproof", "deltaproof", endpoint=server.endpoint, featuredb_username=name, featuredb_password="any"
    )
    project = client.get_project(PROJECT)
    assert project
    view = project.get_dynamic_embedding_feature_view("view")
    assert view
    view.write_features([{"embedding_name": "t", "key_id": 1, "embedding": [1.0]}], VERSION, ts=1)
    assert view.write_flush()["errors"] == []
    client.close()
    assert {entry.client for entry in server.requests()} == {name}
    assert server.log(PROJECT, "view").column("client").to_pylist() == [name]

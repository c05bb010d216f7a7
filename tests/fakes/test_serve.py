"""Starting, stopping and resetting the server: in a thread, in a process, in the foreground."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pyarrow as pa
import pytest
import urllib3

from deltaproof.fakes.errors import InvalidParameter
from deltaproof.fakes.feature_store_py import FeatureStoreClient
from deltaproof.fakes.feature_store_py.transport import _split_endpoint
from deltaproof.fakes.server import FeatureStoreServer, PortInUse, process_main, run_forever
from deltaproof.fakes.server.faults import StatusFault
from deltaproof.fakes.server.serve import client_host
from deltaproof.fakes.server.state import endpoint
from deltaproof.fakes.store import EntitySpec

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

BATCH = ipc(rows(["t"], [1], [[1.0]]))
WRITE = f"/write_arrow?version={VERSION}&ts=7"
WAIT_S = 20


def test_starting_is_fast() -> None:
    with FeatureStoreServer():
        pass  # imports are done
    taken_s = []
    for _ in range(5):
        begun = time.perf_counter()
        server = FeatureStoreServer().start()
        taken_s.append(time.perf_counter() - begun)
        server.stop()
    assert min(taken_s) < 0.05, taken_s


def test_a_taken_port_is_named() -> None:
    with FeatureStoreServer() as first:
        for start in (
            FeatureStoreServer(port=first.port).start,
            lambda: run_forever("127.0.0.1", first.port),
        ):
            with pytest.raises(PortInUse, match=f"port {first.port} on 127.0.0.1 is in use") as caught:
                start()
            assert isinstance(caught.value, OSError)
    with FeatureStoreServer(port=first.port) as again:  # and is free once the server has stopped
        assert again.port == first.port


@pytest.mark.parametrize(
    ("host", "port"), [("203.0.113.7", 0), ("no such host", 0), ("127.0.0.1", 70000), ("\udcff", 0), ("a\0", 0)]
)
def test_an_unusable_address_is_an_oserror_that_names_it(host: str, port: int) -> None:
    with pytest.raises(OSError, match="cannot listen on") as caught:
        FeatureStoreServer(port=port, host=host).start()
    assert f"{host}:{port}" in str(caught.value)


def test_ipv6_loopback() -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with FeatureStoreServer(host="::1") as server:
        assert server.endpoint == f"[::1]:{server.port}"
        assert urllib3.request("GET", f"http://{server.endpoint}/_admin/requests", timeout=10).status == 200


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1:80"),
        ("localhost", "localhost:80"),
        ("127.0.0.2", "127.0.0.2:80"),
        ("0.0.0.0", "127.0.0.1:80"),
        ("::1", "[::1]:80"),
        ("::", "[::1]:80"),
        ("192.0.2.1", "http://192.0.2.1:80"),
        ("2001:db8::1", "http://[2001:db8::1]:80"),
        ("store.example", "http://store.example:80"),
    ],
)
def test_an_address_to_listen_on_is_one_to_connect_to(host: str, reached: str) -> None:
    assert endpoint("http", client_host(host), 80) == reached
    assert _split_endpoint(reached)[:2] == (reached.removeprefix("http://"), "HTTP")  # as a client takes it
    assert endpoint("https", client_host(host), 80) == f"https://{reached.removeprefix('http://')}"


def test_a_server_on_every_address_is_reached_by_each_on_both_planes() -> None:
    with FeatureStoreServer(host="0.0.0.0") as server:
        make_view(server.store)
        for address in (server.endpoint, f"http://127.0.0.5:{server.port}"):
            client = FeatureStoreClient(
                "deltaproof", "deltaproof", endpoint=address, featuredb_username="me", featuredb_password="any"
            )
            project = client.get_project(PROJECT)
            assert project is not None
            view = project.get_dynamic_embedding_feature_view(VIEW)
            assert view is not None
            assert view.high_water_ts(VERSION) == 0
            assert client._transport._featuredb[0].endswith(address.removeprefix("http://"))  # type: ignore[attr-defined]
            client.close()


def test_stopping_twice_and_a_restart_of_the_same_object() -> None:
    server = FeatureStoreServer()
    server.stop()
    server.start()
    make_view(server.store)
    server.stop()
    server.stop()
    with server:
        assert server.store.view(PROJECT, VIEW).name == VIEW


def test_a_stopped_server_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with FeatureStoreServer() as server:
        assert urllib3.request("GET", f"http://{server.endpoint}/health", timeout=10).status == 200
    assert set(threading.enumerate()) <= before


def test_reset_restores_the_pristine_state(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.add_fault(StatusFault(id="f", route="scan"))
    assert raw.data("POST", WRITE, BATCH).status == 200
    kept = raw.data("POST", f"/snapshots?version={VERSION}")
    assert kept.status == 503
    snapshot = json.loads(raw.data("POST", f"/snapshots?version={VERSION}").data)["data"]["snapshot_id"]
    server.store.create_project("more")
    assert raw("POST", "/_admin/reset").status == 200
    assert server.store.projects() == [PROJECT]
    assert server.store.views() == []
    assert server.faults() == []
    assert (
        json.loads(raw("GET", "/_admin/requests").data)
        == {"RequestId": "", "Requests": []}
        | {"RequestId": json.loads(raw("GET", "/_admin/requests").data)["RequestId"]}
        or server.requests() == []
    )
    make_view(server.store)
    assert raw.data("GET", f"/snapshots/{snapshot}/scan").status == 404
    assert server.store.rows(PROJECT, VIEW, VERSION) == 0
    assert raw.data("POST", WRITE, BATCH).status == 200
    assert server.store.log(PROJECT, VIEW).column("arrival").to_pylist() == [0]


def test_reset_may_name_the_projects(server: FeatureStoreServer, raw: Raw) -> None:
    assert raw("POST", "/_admin/reset", body='{"projects": ["a", "b"]}').status == 200
    assert server.store.projects() == ["a", "b"]
    server.reset()
    assert server.store.projects() == [PROJECT]
    with pytest.raises(InvalidParameter):
        server.reset(["a/b"])


def test_a_request_from_before_a_reset_does_not_write_after_it(server: FeatureStoreServer, raw: Raw) -> None:
    """A rank of one scenario is killed while its write is delayed: the next scenario's store must not see it."""
    make_view(server.store)
    raw("PUT", "/_admin/faults", body='[{"id": "f", "kind": "delay", "delay_ms": 300}]')
    outcome: list[object] = []

    def late_write() -> None:
        try:
            outcome.append(raw.data("POST", WRITE, BATCH).status)
        except urllib3.exceptions.ProtocolError as error:
            outcome.append(error)

    thread = threading.Thread(target=late_write)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while server.faults()[0].fired == 0:
        assert time.monotonic() < deadline
    server.reset()
    make_view(server.store)
    thread.join(WAIT_S)
    assert isinstance(outcome[0], urllib3.exceptions.ProtocolError)
    raw("PUT", "/_admin/faults", body='[{"id": "g", "kind": "delay", "delay_ms": 600, "route": "health"}]')
    assert raw("GET", "/health").status == 200  # by now the late request has woken
    assert server.store.log(PROJECT, VIEW).num_rows == 0
    assert [entry.route for entry in server.requests()] == ["health"]


def test_a_reset_breaks_every_connection_but_its_own(server: FeatureStoreServer, raw: Raw) -> None:
    """What lies in the socket of a killed rank must not arrive after the reset, not even a whole request."""
    make_view(server.store)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        request = f"POST {raw.table}{WRITE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BATCH)}\r\n"
        request += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items()) + "\r\n"
        sock.sendall(request.encode() + BATCH)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert raw("POST", "/_admin/reset").status == 200
        make_view(server.store)
        with contextlib.suppress(ConnectionError):
            sock.sendall(request.encode() + BATCH)
            assert sock.recv(65536) == b""
    assert server.store.log(PROJECT, VIEW).num_rows == 0


def test_pooled_clients_survive_a_reset(server: FeatureStoreServer, raw: Raw) -> None:
    for _ in range(20):
        make_view(server.store)
        assert raw.data("POST", WRITE, BATCH).status == 200
        assert raw("GET", "/health").status == 200
        server.reset()


def test_admin_log_is_the_stores_log(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    for ts in (5, 6):
        raw.data("POST", f"/write_arrow?version={VERSION}&ts={ts}", BATCH)
    reply = raw("GET", f"/_admin/log?project={PROJECT}&view={VIEW}")
    table = pa.ipc.open_stream(reply.data).read_all()
    assert table.equals(server.log(PROJECT, VIEW))
    assert table.column("ts").to_pylist() == [5, 6]
    since = json.loads(raw("GET", "/_admin/requests?since=1").data)["Requests"]
    assert [entry["seq"] for entry in since] == [1]


def test_a_scan_streams_batch_by_batch(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    count = 150_000
    keys = pa.array(range(count), pa.int64())
    flat = pa.array([0.5] * count, pa.float32())
    embedding = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), flat)
    server.store.write(
        PROJECT,
        VIEW,
        pa.table({"pk": pa.repeat("t", count), "sk": keys, "embedding": embedding}),
        version=VERSION,
        ts=5,
    )
    snapshot = json.loads(raw.data("POST", f"/snapshots?version={VERSION}").data)["data"]["snapshot_id"]
    reply = raw.data("GET", f"/snapshots/{snapshot}/scan")
    assert reply.headers["Transfer-Encoding"] == "chunked"
    reader = pa.ipc.open_stream(pa.py_buffer(reply.data))
    sizes = [batch.num_rows for batch in reader]
    assert sum(sizes) == count
    assert max(sizes) <= 65_536


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_process_entry_serves_and_ends_with_its_pipe(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=process_main, args=(theirs,), daemon=True)
    process.start()
    try:
        theirs.close()
        assert ours.poll(60)
        port = ours.recv()
        url = f"http://127.0.0.1:{port}"
        assert urllib3.request("GET", f"{url}/health", timeout=10).status == 200
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)  # ignored: Ctrl-C is the supervisor's
        assert urllib3.request("GET", f"{url}/health", timeout=10).status == 200
        ours.close()
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(WAIT_S)


SERVE = """
import sys
from deltaproof.fakes.server import run_forever
run_forever("127.0.0.1", 0, ready=lambda port: print(port, flush=True))
print("stopped", "torch" in sys.modules, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_foreground_server_ends_on_a_signal(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert urllib3.request("GET", f"http://127.0.0.1:{port}/health", timeout=10).status == 200
        process.send_signal(number)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert (rest.strip(), process.returncode) == ("stopped False", 0)
    finally:
        process.kill()
        process.wait(WAIT_S)


def test_the_foreground_server_takes_more_connections_than_a_low_soft_limit() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 400))\n" + SERVE
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with contextlib.ExitStack() as connections:
            for _ in range(100):
                one = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert one.recv(4096).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait(WAIT_S)


def test_faults_and_the_facade_cost_no_server_import() -> None:
    """The deterministic engine uses both without sockets: neither may pull in aiohttp, torch or the OpenAPI client."""
    code = (
        "import sys; import deltaproof.fakes.feature_store_py, deltaproof.fakes.server.faults; "
        "print({'aiohttp', 'torch', 'alibabacloud_paifeaturestore20230621', 'urllib3'} & set(sys.modules) or '{}')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "{}"


def test_two_hundred_clients_at_once_lose_nothing(server: FeatureStoreServer) -> None:
    make_view(server.store)
    server.store.create_entity(EntitySpec(PROJECT, "other", "id"))
    raw = Raw(server)
    statuses: list[int] = []

    def work(number: int) -> None:
        for step in range(3):
            body = ipc(rows(["t"], [number], [[float(step)]]))
            statuses.append(raw.data("POST", f"/write_arrow?version={VERSION}&ts={step + 1}", body).status)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    raw.close()
    assert statuses == [200] * 600
    assert server.store.log(PROJECT, VIEW).num_rows == 600
    found = pa.Table.from_batches(server.store.scan(PROJECT, VIEW, VERSION))
    assert found.column("embedding").to_pylist() == [[2.0]] * 200

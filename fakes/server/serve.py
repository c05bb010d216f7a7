"""Running the server: in a thread of this process, alone in a process, or in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import signal
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Final

import pyarrow as pa
from aiohttp import web

from ..durable import DurableStore, Fsync
from ..plan import Faulty
from ..served import STOP_TIMEOUT_S, LoopServed
from ..store import Store
from .connection import HttpConnection
from .faults import AnyFault
from .handlers import RUNNER, hang_up
from .routes import BODY_BYTES_MAX, BODY_TIMEOUT_S, make_app
from .signature import Accounts, Verifier
from .state import DEFAULT_TOKEN, RequestEntry, ServerState, endpoint
from .tls import Certificate, self_signed

SHUTDOWN_S: Final = 0.5  # what requests under way get when the server stops


class CannotListen(OSError):
    """No server can listen on that address; ``strerror`` names it and says why."""


class PortInUse(CannotListen):
    """The port is taken. Cure: stop the process that listens on it, or ask for port 0 (any free port)."""


def wall_store() -> Store:
    """An empty store on the host's clocks."""
    return Store(lambda: time.time_ns() // 1_000_000, monotonic_ms=lambda: time.monotonic() * 1000)


def _bind(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises PortInUse, CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(256)
        sock.setblocking(False)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the last two: a host that no text can name
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUse(
                errno.EADDRINUSE, f"port {port} on {host} is in use; choose another, or 0 for any"
            ) from None
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
        raise CannotListen(number, f"cannot listen on {host}:{port} ({error})") from None
    return sock


@contextlib.asynccontextmanager
async def _serving(
    state: ServerState,
    sock: socket.socket,
    body_bytes_max: int,
    body_timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[web.Application]:
    """Serve on ``sock`` inside the block; afterwards it is closed and every connection is broken."""
    app = make_app(state, body_bytes_max=body_bytes_max, body_timeout_s=body_timeout_s)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
    app[RUNNER] = runner
    await runner.setup()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None  # set by setup()
    listener = await loop.create_server(
        lambda: HttpConnection(server, loop=loop, access_log=None, timeout_s=body_timeout_s),
        sock=sock,
        ssl=tls,
        ssl_handshake_timeout=body_timeout_s if tls else None,
    )
    try:
        yield app
    finally:
        listener.close()
        connections = server.connections
        await runner.cleanup()
        for connection in connections:  # those whose peers do not read are still open
            if isinstance(connection, HttpConnection):
                connection.cut_off()
        await asyncio.sleep(0)


def client_host(host: str) -> str:
    """The host in the address by which this machine's clients reach a server that listens on ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host  # a name
    if address.is_unspecified:  # every address of the machine
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"[{address}]" if address.version == 6 else str(address)


def _address(sock: socket.socket) -> tuple[str, int]:
    host, port = sock.getsockname()[:2]
    return client_host(host), port


def kept_store(folder: str | os.PathLike[str], fsync: Fsync = "os") -> DurableStore:
    """The store in ``folder`` on the host's clocks. Raises DataDirError (in use, damaged, not writable)."""
    return DurableStore(
        folder, lambda: time.time_ns() // 1_000_000, monotonic_ms=lambda: time.monotonic() * 1000, fsync=fsync
    )


class FeatureStoreServer(LoopServed, Faulty[AnyFault]):
    """The server in a background thread: ``with FeatureStoreServer() as server: … server.endpoint``.

    ``port`` 0 takes a free port. ``store`` may be given to share one. ``accounts`` may sign control-plane requests,
    ``{access key id: secret}`` or ``signature.Accounts``; by default ``signature.DEFAULT_ACCOUNTS``. ``clock`` (seconds
    since 1970) is for signatures only. ``tls`` True serves HTTPS with a certificate that signs itself, which clients
    trust by ``ca_file``; a ``tls.Certificate`` names files of your own. Raises PortInUse from ``start``.
    """

    WHAT: ClassVar[str] = "fake Feature Store"

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        store: Store | None = None,
        token: str = DEFAULT_TOKEN,
        accounts: Accounts | Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        tls: Certificate | bool = False,
        body_bytes_max: int = BODY_BYTES_MAX,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._host, self._want_port = host, port
        self._tls = tls
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.ca_file: str | None = None  # of the certificate, once started with tls
        self._limits = (body_bytes_max, body_timeout_s)
        self.state = ServerState(store or wall_store(), token, Verifier(accounts, clock=clock))
        self._plan = self.state.faults
        self.port = 0
        self.endpoint = ""

    @property
    def store(self) -> Store:
        return self.state.store

    def _open(self) -> None:
        self._context = context = self._tls_context()
        self._sock = _bind(self._host, self._want_port)
        host, self.port = _address(self._sock)
        self.state.scheme = "https" if context else "http"
        self.endpoint = endpoint(self.state.scheme, host, self.port)

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self._tls:
            return None
        if isinstance(self._tls, bool):
            # Named as the process engine's folders: whoever is killed, its next run removes them.
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix=f"deltaproof-{os.getpid()}-tls-")
            certificate = self_signed(Path(self._folder.name), self._host)
        else:
            certificate = self._tls
        self.ca_file = str(certificate.cert_file)
        return certificate.context()

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with _serving(self.state, self._sock, *self._limits, self._context) as self._app:
            yield

    def _close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # What /_admin offers, without HTTP

    def requests(self) -> list[RequestEntry]:
        with self.state.lock:
            return list(self.state.requests)

    def log(self, project: str, view: str) -> pa.Table:
        return self.store.log(project, view)

    def reset(self, projects: Sequence[str] | None = None) -> None:
        """As ``/_admin/reset``: pristine state, all connections broken."""

        async def act() -> None:
            self.state.reset(projects)
            hang_up(self._app)

        if self._thread is None:
            self.state.reset(projects)
        else:
            asyncio.run_coroutine_threadsafe(act(), self._loop).result(STOP_TIMEOUT_S)


def run_forever(
    host: str,
    port: int,
    *,
    ready: Callable[[int], None] | None = None,
    store: Store | None = None,
    token: str = DEFAULT_TOKEN,
    accounts: Accounts | Mapping[str, str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    fsync: Fsync = "os",
    tls: Certificate | None = None,
) -> None:
    """Serve in the foreground until SIGINT or SIGTERM; ``ready`` is called with the port.

    ``data_dir`` keeps the content over a restart; ``fsync``: see ``fakes/durable.py``. Raises PortInUse, DataDirError
    (in use, damaged, not writable), OSError.
    """
    context = tls.context() if tls else None
    _take_descriptors()
    with contextlib.ExitStack() as cleanup:
        if data_dir is not None:
            store = cleanup.enter_context(kept_store(data_dir, fsync))
        sock = _bind(host, port)
        state = ServerState(store or wall_store(), token, Verifier(accounts))
        asyncio.run(_until_stopped(sock, state, ready, tls=context))


def _take_descriptors() -> None:
    """As many as this process may have: a shell's soft limit, often 1,024, would be that of connections."""
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_stopped(
    sock: socket.socket,
    state: ServerState,
    ready: Callable[[int], None] | None,
    hangup: Connection | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    port = sock.getsockname()[1]
    state.scheme = "https" if tls else "http"
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if hangup is None:
            loop.add_signal_handler(signal.SIGINT, stop.set)
    if hangup is not None:
        loop.add_reader(hangup.fileno(), stop.set)
    async with _serving(state, sock, BODY_BYTES_MAX, BODY_TIMEOUT_S, tls):
        if ready is not None:
            ready(port)
        await stop.wait()
        if hangup is not None:
            loop.remove_reader(hangup.fileno())


def process_main(port_conn: Connection) -> None:
    """Process entry: serve on a free loopback port, send the port, exit when the connection is closed or written to.

    SIGINT is ignored: Ctrl-C reaches the whole process group, and the supervisor decides when the store goes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = _bind("127.0.0.1", 0)
    asyncio.run(_until_stopped(sock, ServerState(wall_store()), port_conn.send, port_conn))

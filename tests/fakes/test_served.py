"""A server in a thread: started, failed to start, stopped, started again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import pytest

from deltaproof.fakes import served
from deltaproof.fakes.credentials import CredentialServer
from deltaproof.fakes.objects import ObjectStore
from deltaproof.fakes.served import LoopServed, Served
from deltaproof.fakes.server import FeatureStoreServer

WAIT_S = 20.0


class Echo(LoopServed):
    """Answers with what it gets."""

    WHAT: ClassVar[str] = "echo"

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.fail: Callable[[], None] = lambda: None

    def _open(self) -> None:
        self.opened += 1
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(100))
            writer.close()

        self.fail()
        async with await asyncio.start_server(answer, sock=self._sock):
            yield

    def _close(self) -> None:
        self.closed += 1

    def ask(self) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as sock:
            sock.sendall(b"hello")
            return sock.recv(100)


def test_it_serves_between_start_and_stop_again_and_again() -> None:
    before = set(threading.enumerate())
    echo = Echo()
    for _ in range(3):
        with echo:
            assert echo.ask() == b"hello"
            assert any(thread.name == "deltaproof echo" for thread in threading.enumerate())
        with pytest.raises(ConnectionRefusedError):
            echo.ask()
        echo.stop()  # twice does no harm
    assert (echo.opened, echo.closed) == (3, 3)
    assert set(threading.enumerate()) <= before


def test_starting_it_twice_is_starting_it_once() -> None:
    threads = set(threading.enumerate())
    with FeatureStoreServer().start() as server:
        port = server.port
        assert server.start().port == port
        assert len(set(threading.enumerate()) - threads) == 1
    assert not {thread for thread in set(threading.enumerate()) - threads if "Feature Store" in thread.name}


def test_what_keeps_it_from_starting_reaches_the_caller_and_it_may_be_tried_again() -> None:
    before = set(threading.enumerate())
    echo = Echo()

    def fail() -> None:
        raise ValueError("no luck")

    echo.fail = fail
    with pytest.raises(RuntimeError, match="the echo did not start") as caught:
        echo.start()
    assert isinstance(caught.value.__cause__, ValueError)
    assert set(threading.enumerate()) <= before
    assert echo.closed == 1
    echo.stop()
    echo.fail = lambda: None
    with echo:
        assert echo.ask() == b"hello"


class Stuck(Served):
    """Never ready, or never done."""

    WHAT: ClassVar[str] = "stuck server"

    def __init__(self, ready: bool) -> None:
        self._is_ready = ready
        self.let_go = threading.Event()

    def _open(self) -> None:
        pass

    def _serve(self, ready: Callable[[], None]) -> None:
        if self._is_ready:
            ready()
        self.let_go.wait(WAIT_S)

    def _halt(self) -> None:
        pass


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(served, "STOP_TIMEOUT_S", 0.05)
    for ready, act in ((False, "start"), (True, "stop")):
        stuck = Stuck(ready)
        if act == "stop":
            stuck.start()
        with pytest.raises(RuntimeError, match=rf"the stuck server did not {act} within 0\.05 s"):
            getattr(stuck, act)()
        stuck.let_go.set()
        stuck.stop()


@pytest.mark.parametrize("make", [FeatureStoreServer, CredentialServer, ObjectStore])
def test_every_fake_is_served_so(make: Callable[[], Served]) -> None:
    before = threading.enumerate()
    made = make()
    made.stop()
    for _ in range(2):
        with made:
            assert f"deltaproof {made.WHAT}" in [thread.name for thread in threading.enumerate()]
        made.stop()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(WAIT_S)  # the object store's threads end a moment after their connections
    assert not any(thread.is_alive() for thread in left)

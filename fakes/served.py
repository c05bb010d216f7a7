"""A server in a background thread of this process: what the fakes' servers have in common."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import ClassVar, Final, Self

START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 10.0


class Served:
    """Serves from ``start`` to ``stop``, or inside ``with``; may be started again.

    A subclass takes its port in ``_open``, serves in ``_serve`` until ``_halt`` is called, and cleans up in ``_close``.
    ``_open``, ``_halt`` and ``_close`` run in the caller's thread, so what they raise reaches the caller.
    """

    WHAT: ClassVar[str]  # named by errors and by the thread

    _thread: threading.Thread | None = None
    _failures: list[BaseException]

    def start(self) -> Self:
        """Take the port and serve; returns once requests are answered. Safe to call twice. Raises RuntimeError, or as
        ``_open``.
        """
        if self._thread is not None and self._thread.is_alive():
            return self  # as in `with Server().start() as server:`
        self._open()
        ready = threading.Event()
        self._failures = []
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"deltaproof {self.WHAT}", daemon=True)
        self._thread.start()
        if not ready.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the {self.WHAT} did not start within {START_TIMEOUT_S:g} s")
        for failure in self._failures:
            self.stop()
            raise RuntimeError(f"the {self.WHAT} did not start") from failure
        return self

    def stop(self) -> None:
        """Stop serving; open connections are closed. Safe to call twice. Raises RuntimeError when it takes too long."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            if not self._failures:  # else the thread is about to end
                self._halt()
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise RuntimeError(f"the {self.WHAT} did not stop within {STOP_TIMEOUT_S:g} s")
        self._thread = None
        self._close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, ready: threading.Event) -> None:
        try:
            self._serve(ready.set)
        except BaseException as error:
            if ready.is_set():
                raise
            self._failures.append(error)  # for the caller of start
            ready.set()

    def _open(self) -> None:
        raise NotImplementedError

    def _serve(self, ready: Callable[[], None]) -> None:
        raise NotImplementedError

    def _halt(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        """Nothing to clean up."""


class LoopServed(Served):
    """Serves in an asyncio loop of its own, for as long as the block of ``_serving()`` lasts."""

    _loop: asyncio.AbstractEventLoop
    _stop: asyncio.Event

    def _serving(self) -> AbstractAsyncContextManager[object]:
        raise NotImplementedError

    def _serve(self, ready: Callable[[], None]) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with self._serving():
                ready()
                await self._stop.wait()

        asyncio.run(serve())

    def _halt(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


def reset_when_closed(sock: socket.socket) -> None:
    """Linger 0: when the socket is closed the kernel sends RST, so the peer sees a reset and no orderly end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def break_off(transport: asyncio.WriteTransport | None) -> None:
    """Reset a connection, whatever waits to be sent over it; None: it is gone already."""
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None:
            reset_when_closed(sock)
        transport.abort()

"""One connection: what is no HTTP, clients that trickle their request, clients that do not read their reply."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http import HttpProcessingError, RawRequestMessage

from ..errors import Injected
from ..served import break_off
from .routes import BODY_TIMEOUT_S, refuse
from .state import RequestEntry

log = logging.getLogger(__name__)

REPLY_BYTES_MIN: Final = 2**20  # what a client must take of a waiting reply within the time for a head


class HttpConnection(web.RequestHandler):
    """A connection whose protocol errors (bad request line, oversized headers) have the service's error shape too, and
    which waits ``timeout_s`` at most, where aiohttp itself would wait for ever:

    - for the end of a request's head, from its first byte (or the connecting) on. A piece of a head that came together
      with the end of the request before it is noticed when that time is over; until then it is taken for silence, which
      between requests may last. So a client that sends more of it just then has the time twice, at most.
    - for a client that reads nothing, or less than ``REPLY_BYTES_MIN`` in that time, of a reply that waits to be sent.

    A client that is late is cut off.
    """

    __slots__ = ("_body", "_deadline_s", "_in_head", "_line", "_timeout_s", "_timer", "_unsent_bytes", "_write_timer")

    def __init__(self, *arguments: Any, timeout_s: float = BODY_TIMEOUT_S, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._timeout_s = timeout_s
        self._line: asyncio.Transport | None = None  # aiohttp forgets its own before it is closed
        self._body: StreamReader | None = None  # of the request whose head came last
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._in_head = True  # surely; else it is not known
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._line = cast(asyncio.Transport, transport)
        self._watch(in_head=True)

    def connection_lost(self, error: BaseException | None) -> None:
        self._line = self._body = None
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(error)

    def cut_off(self) -> None:
        """Reset the connection, whatever waits to be sent: the peer may never read it."""
        if self._line is not None:
            break_off(self._line)

    # The head

    def data_received(self, data: bytes) -> None:
        heads = self._request_count
        super().data_received(data)
        if self._request_count > heads:
            self._end_broken_body()
        if self._request_count > heads or not self._rests():
            self._watch(in_head=False)  # perhaps it ends with a piece of the next head
        elif not self._in_head:
            self._watch(in_head=True)

    def _end_broken_body(self) -> None:
        """Wake the handler that waits for a body whose end the parser finds broken (a deflate stream that stops short):
        the parser queues an error, to be answered after that request, and forgets the body.
        """
        for message, payload in self._messages:
            if isinstance(message, RawRequestMessage):
                self._body = payload
            elif self._body is not None and not self._body.is_eof():
                self._body.set_exception(web.RequestPayloadError("the body's end is broken"))

    def _rests(self) -> bool:
        """Whether nothing is under way but, perhaps, a head on its way."""
        return self._waiter is not None and not self._waiter.done()

    def _watch(self, in_head: bool) -> None:
        self._in_head = in_head
        self._deadline_s = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._line is None:
            return
        if self._loop.time() < self._deadline_s:  # moved on since: cheaper than a new timer for every request
            self._timer = self._loop.call_at(self._deadline_s, self._look)
        elif self._line.is_closing() and not self._in_head:
            self._watch(in_head=True)  # once more the time, to read the end of what was sent
        elif not self._rests() and not self._line.is_closing():
            self._watch(in_head=False)
        elif self._in_head or self._holds_a_piece():
            self._line.abort()

    def _holds_a_piece(self) -> bool:
        """Whether the parser has a part of a head. It does not say; but between requests empty lines mean nothing to
        it, and in a head they are its end or an error. (What it has is given up then, whatever it is.)
        """
        assert self._parser is not None  # as long as there is a line
        try:
            return bool(self._parser.feed_data(b"\r\n\r\n")[0])
        except HttpProcessingError:
            return True

    # The reply

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_reading(self) -> None:
        assert self._line is not None  # only a line can pause
        self._unsent_bytes = self._line.get_write_buffer_size()
        self._write_timer = self._loop.call_later(self._timeout_s, self._look_at_reading)

    def _look_at_reading(self) -> None:
        self._write_timer = None
        if self._line is None:
            return
        if self._line.get_write_buffer_size() > self._unsent_bytes - REPLY_BYTES_MIN:
            break_off(self._line)  # with a reset: else the system, too, would keep what nobody reads
        else:
            self._await_reading()

    # Errors

    def log_exception(self, *args: Any, exc_info: Any = None, **keywords: Any) -> None:
        """A client that leaves, or sends rubbish, while the rest of its refused body is awaited is no news."""
        if not isinstance(exc_info, ConnectionError | web.RequestPayloadError):
            super().log_exception(*args, exc_info=exc_info, **keywords)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called by aiohttp for what never reached a route; 500 only for a bug in this server."""
        if status >= 500:
            log.error("connection failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of a reply is sent already")
        entry = RequestEntry(-1, uuid.uuid4().hex, 0.0, "unknown")
        response = refuse(entry, Injected(status, "not a valid HTTP request"))
        response.force_close()
        return response

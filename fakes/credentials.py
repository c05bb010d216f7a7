"""A credential endpoint for ``ALIBABA_CLOUD_CREDENTIALS_URI``, and the vault that knows which tokens are good.

Public (what the published Python client ``alibabacloud_credentials`` parses): GET answers JSON with ``Code``
"Success", ``AccessKeyId``, ``AccessKeySecret``, ``SecurityToken`` and ``Expiration`` (UTC, ``%Y-%m-%dT%H:%M:%SZ``). The
client reads the variable when it is imported, keeps a token until 15 minutes before it expires, and asks again at
every use from then on. Its default chain tries this endpoint last. Ours: the path, when a token is renewed, and the
error bodies.

A warning that the fake makes testable: when an answer lacks a field, or its Code is not Success, the published client
quotes the whole answer in its exception and logs it. So an answer without ``Expiration`` (``Garbage(what=
"no-expiration")``) puts a live secret into whatever prints that exception. ``TokenVault.secrets`` lists all that must
appear nowhere.

Secrets stand in no ``repr``, no log entry and no error of this module.
"""

from __future__ import annotations

import _thread
import asyncio
import base64
import collections
import contextlib
import hmac
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import ClassVar, Final, Literal

import msgspec
from aiohttp import web

from .errors import InvalidParameter
from .plan import Faulty, Plan, Planned
from .served import LoopServed, break_off

STALE_S: Final = 900  # the published client counts a token as stale this long before it expires
LIFETIME_S: Final = 3600.0
TOKENS_MAX: Final = 10_000
LOG_MAX: Final = 10_000
PATH: Final = "/credentials"

Verdict = Literal["ok", "unknown-key", "wrong-token", "expired", "revoked"]


class StsToken(msgspec.Struct, frozen=True):
    """One set of temporary credentials. ``number`` counts issues from 1; ``expires_s`` is seconds since the epoch."""

    number: int
    access_key_id: str
    access_key_secret: str
    security_token: str
    expires_s: float

    def __repr__(self) -> str:
        return f"StsToken(number={self.number}, access_key_id={self.access_key_id!r}, expires_s={self.expires_s})"

    def answer(self) -> dict[str, str]:
        """The endpoint's success answer. Expiration has whole seconds, rounded down: never later than the truth."""
        expiration = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(self.expires_s)))
        return {
            "Code": "Success",
            "AccessKeyId": self.access_key_id,
            "AccessKeySecret": self.access_key_secret,
            "SecurityToken": self.security_token,
            "Expiration": expiration,
        }


class TokenVault:
    """Issues tokens and judges them. No sockets, no threads; ``clock`` gives seconds since the epoch.

    ``current`` hands out one token until it has less than ``renew_left_s`` left (default: 20 minutes, so that a client
    never gets one it must count as stale at once; with a lifetime below that, each request gets a fresh one).
    A ``seed`` makes the tokens repeatable. Keeps the last TOKENS_MAX tokens.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        lifetime_s: float = LIFETIME_S,
        renew_left_s: float = STALE_S + 300.0,
        seed: int | None = None,
    ) -> None:
        self.lifetime_s = lifetime_s
        self._clock, self._renew_left_s = clock, renew_left_s
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._tokens: collections.OrderedDict[str, StsToken] = collections.OrderedDict()
        self._revoked: set[str] = set()
        self._current: StsToken | None = None
        self._issued = 0
        self._lock = _thread.allocate_lock()  # not threading.Lock, which a simulator replaces

    def __repr__(self) -> str:
        return f"TokenVault(issued={self._issued}, lifetime_s={self.lifetime_s:g})"

    @property
    def issued(self) -> int:
        """Tokens issued so far."""
        return self._issued

    def issue(self, lifetime_s: float | None = None) -> StsToken:
        """A fresh token, valid for ``lifetime_s`` (negative: born expired). It becomes the current one."""
        with self._lock:
            return self._issue(self.lifetime_s if lifetime_s is None else lifetime_s)

    def current(self) -> StsToken:
        """The token to hand out now; a fresh one when the last was rotated away, revoked or nearly expired."""
        with self._lock:
            token = self._current
            if token is None or token.access_key_id in self._revoked:
                return self._issue(self.lifetime_s)
            if token.expires_s - self._clock() < self._renew_left_s:
                return self._issue(self.lifetime_s)
            return token

    def rotate(self) -> None:
        """The next request gets a fresh token. Those handed out stay good until they expire."""
        with self._lock:
            self._current = None

    def revoke(self, access_key_id: str | None = None) -> None:
        """From now on this key (None: every key issued so far) is refused, whatever its expiry says."""
        with self._lock:
            self._revoked.update(self._tokens if access_key_id is None else {access_key_id} & self._tokens.keys())

    def verdict(self, access_key_id: str, security_token: str, now: float | None = None) -> Verdict:
        """What a service says to these credentials at ``now`` (seconds since the epoch; default: the clock's).

        The token is compared in constant time. A token is good before its expiry and no longer at it.
        """
        with self._lock:
            token, revoked = self._tokens.get(access_key_id), access_key_id in self._revoked
        if token is None:
            return "unknown-key"
        # surrogatepass: what a hostile header decodes to may be no valid text
        if not hmac.compare_digest(token.security_token.encode(), security_token.encode(errors="surrogatepass")):
            return "wrong-token"
        if revoked:
            return "revoked"
        return "ok" if (self._clock() if now is None else now) < token.expires_s else "expired"

    def accepts(self, access_key_id: str, security_token: str, now: float | None = None) -> bool:
        """Whether these credentials are good at ``now``."""
        return self.verdict(access_key_id, security_token, now) == "ok"

    def secret_of(self, access_key_id: str) -> str | None:
        """The secret a signature is made with, whether the token is good or not; None for a key never issued."""
        with self._lock:
            token = self._tokens.get(access_key_id)
        return None if token is None else token.access_key_secret

    def secrets(self) -> frozenset[str]:
        """Every secret and security token issued: what must appear in no log, page, error or published row."""
        with self._lock:
            tokens = list(self._tokens.values())
        return frozenset(text for token in tokens for text in (token.access_key_secret, token.security_token))

    def _issue(self, lifetime_s: float) -> StsToken:
        self._issued += 1
        token = StsToken(
            number=self._issued,
            access_key_id=f"STS.{self._text(18)}",
            access_key_secret=self._text(33),
            security_token=self._text(288),
            expires_s=self._clock() + lifetime_s,
        )
        self._tokens[token.access_key_id] = self._current = token
        while len(self._tokens) > TOKENS_MAX:
            dropped, _ = self._tokens.popitem(last=False)
            self._revoked.discard(dropped)
        return token

    def _text(self, size: int) -> str:
        """``size`` characters as such tokens have them: URL-safe base64."""
        return base64.urlsafe_b64encode(self._random.randbytes(size)).decode().rstrip("=")


class Refusal(Planned, tag="refusal", kw_only=True, frozen=True):
    """Answer with an HTTP ``status`` and, in the body, a ``code`` that is not Success.

    Status 200 is the other way to refuse: the published client looks at Code then.
    """

    status: int = 403
    code: str = "Forbidden"

    def check(self) -> None:
        super().check()
        if self.status != 200 and not 400 <= self.status <= 599:
            raise InvalidParameter(f"fault {self.id}: status {self.status}, want 200 or 400 to 599")
        if self.code == "Success":
            raise InvalidParameter(f"fault {self.id}: a refusal cannot have Code Success")


class Slow(Planned, tag="slow", kw_only=True, frozen=True):
    """Wait, then answer as if nothing had happened. The published client waits 10 s for an answer."""

    STACKS: ClassVar[bool] = True

    delay_ms: float

    def check(self) -> None:
        super().check()
        self.check_range("delay_ms", self.delay_ms)


class Garbage(Planned, tag="garbage", kw_only=True, frozen=True):
    """Answer 200 with a body that is no credentials: cut off, empty, not JSON, not UTF-8, or a field missing or odd.

    "truncated", "no-expiration" and "bad-expiration" hold a live token (see the module's warning).
    """

    what: Literal["not-json", "empty", "not-utf8", "truncated", "no-secret", "no-expiration", "bad-expiration"] = (
        "not-json"
    )

    def body(self, token: StsToken) -> bytes:
        answer = token.answer()
        if self.what == "not-json":
            return b"<html>503 upstream not ready</html>"
        if self.what == "empty":
            return b""
        if self.what == "not-utf8":
            return b'{"Code": "Success", "AccessKeyId": "\xff\xfe"}'
        if self.what == "no-secret":
            del answer["AccessKeySecret"], answer["SecurityToken"]
        elif self.what == "no-expiration":
            del answer["Expiration"]
        elif self.what == "bad-expiration":
            answer["Expiration"] = "soon"
        body = json.dumps(answer).encode()
        return body[: len(body) // 2] if self.what == "truncated" else body


class Expired(Planned, tag="expired", kw_only=True, frozen=True):
    """Hand out a fresh token that expired ``age_s`` ago."""

    age_s: float = 1.0

    def check(self) -> None:
        super().check()
        if not self.age_s >= 0:
            raise InvalidParameter(f"fault {self.id}: age_s {self.age_s}, want >= 0")


class Reset(Planned, tag="reset", kw_only=True, frozen=True):
    """Break the connection (TCP reset) instead of answering."""


CredentialFault = Refusal | Slow | Garbage | Expired | Reset


class CredentialRequest(msgspec.Struct, frozen=True):
    """One request and its fate. ``t_ms`` is monotonic; ``status`` 0 when the connection was broken.

    ``token`` is the number of the token in the answer (StsToken.number), 0 for none; ``fault`` the fault that decided.
    """

    seq: int
    t_ms: float
    status: int
    token: int
    fault: str | None


class CredentialServer(LoopServed, Faulty[CredentialFault]):
    """The endpoint in a thread of its own: ``with CredentialServer() as server:`` and ``server.uri``.

    ``vault`` judges the tokens (``accepts`` and ``secret_of`` are its own). Raises OSError when the port is taken
    (0: any free one).
    """

    WHAT: ClassVar[str] = "credential endpoint"

    def __init__(self, port: int = 0, host: str = "127.0.0.1", *, vault: TokenVault | None = None) -> None:
        self._host, self._want_port = host, port
        self.vault = vault or TokenVault()
        self.port = 0
        self.uri = ""
        self._plan: Plan[CredentialFault] = Plan()
        self._log: collections.deque[CredentialRequest] = collections.deque(maxlen=LOG_MAX)
        self._requests = 0

    def __repr__(self) -> str:
        return f"CredentialServer(uri={self.uri!r}, requests={self._requests})"

    def _open(self) -> None:
        self._sock = socket.create_server((self._host, self._want_port), backlog=64)
        self.port = self._sock.getsockname()[1]
        self.uri = f"http://{self._host}:{self.port}{PATH}"

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get(PATH, self._answer, allow_head=False)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, self._sock).start()
            yield
        finally:
            await runner.cleanup()

    def environment(self) -> dict[str, str]:
        """Variables for a process that imports the published client later, with its other sources of credentials off.

        ``HOME`` is not among them, and profile files come before the endpoint: point it at an empty folder.
        """
        return {
            "ALIBABA_CLOUD_CREDENTIALS_URI": self.uri,
            "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
            "ALIBABA_CLOUD_CLI_PROFILE_DISABLED": "true",
            "NO_PROXY": self._host,
            "no_proxy": self._host,
        }

    def accepts(self, access_key_id: str, security_token: str, now: float | None = None) -> bool:
        """Whether these credentials are good at ``now`` (seconds since the epoch)."""
        return self.vault.accepts(access_key_id, security_token, now)

    def secret_of(self, access_key_id: str) -> str | None:
        """The secret a signature is made with; None for a key never issued."""
        return self.vault.secret_of(access_key_id)

    def rotate(self) -> None:
        """The next request gets a fresh token; those handed out stay good."""
        self.vault.rotate()

    def requests(self) -> list[CredentialRequest]:
        """The last requests and their fates, oldest first."""
        return list(self._log)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        stacked, main, _ = self._plan.meet()
        for fault in stacked:
            assert isinstance(fault, Slow)
            await asyncio.sleep(fault.delay_ms / 1000)
        token = None
        status = 200
        if isinstance(main, Reset):
            self._note(0, None, main)
            break_off(request.transport)
            return web.Response(status=499)  # nobody gets it
        if isinstance(main, Refusal):
            status = main.status
            body = json.dumps({"Code": main.code, "Message": f"refused by the fault {main.id}"}).encode()
        elif isinstance(main, Garbage):
            token = self.vault.current()
            body = main.body(token)
        else:
            token = self.vault.issue(-main.age_s) if isinstance(main, Expired) else self.vault.current()
            body = json.dumps(token.answer()).encode()
        self._note(status, token, main)
        return web.Response(status=status, body=body, content_type="application/json")

    def _note(self, status: int, token: StsToken | None, fault: CredentialFault | None) -> None:
        self._requests += 1
        number = 0 if token is None else token.number
        entry = CredentialRequest(
            self._requests, time.monotonic() * 1000, status, number, None if fault is None else fault.id
        )
        self._log.append(entry)

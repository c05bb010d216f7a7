"""Verifying the control plane's signatures: ACS3-HMAC-SHA256 as Alibaba's gateway does (public).

A request is signed over method, path, query, the headers named in ``SignedHeaders`` and the SHA-256 of its body. Order
of the checks, each with the gateway's code: form (IncompleteSignature), access key (InvalidAccessKeyId.NotFound),
signature (SignatureDoesNotMatch), date within 15 minutes (InvalidTimeStamp.Expired), security token
(MissingSecurityToken, InvalidSecurityToken.MismatchWithAccessKey, InvalidSecurityToken.Expired), nonce
(SignatureNonceUsed), and once the body is there its hash (SignatureDoesNotMatch). So only whoever holds the secret can
learn more, or fill the nonce memory. No sockets here, and the clock is injected.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, Protocol
from urllib.parse import parse_qsl, quote

from ..errors import (
    ExpiredSecurityToken,
    ExpiredTimeStamp,
    IncompleteSignature,
    InvalidParameter,
    MalformedTimeStamp,
    MismatchedSecurityToken,
    MissingAuthorization,
    MissingSecurityToken,
    SignatureDoesNotMatch,
    SignatureNonceUsed,
    UnknownAccessKeyId,
)

ALGORITHM: Final = "ACS3-HMAC-SHA256"
#: The account that a server knows unless it is told others. No secret: it opens nothing but a fake.
DEFAULT_ACCOUNTS: Final[Mapping[str, str]] = {"deltaproof": "deltaproof"}
WINDOW_S: Final = 15 * 60.0
NONCES_MAX: Final = 100_000
NONCE_CHARS_MAX: Final = 256
_AUTHORIZATION: Final = re.compile(
    ALGORITHM + r" Credential=(?P<key>[!-+\--~]{1,256}),\s*SignedHeaders=(?P<headers>[a-z0-9;-]+),\s*"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)
_REQUIRED: Final = (
    "host",
    "x-acs-action",
    "x-acs-content-sha256",
    "x-acs-date",
    "x-acs-signature-nonce",
    "x-acs-version",
)


class Accounts(Protocol):
    """Who may sign. ``now``: seconds since 1970.

    ``accepts`` says whether the token ("" when none was sent) belongs to the key and is valid at ``now``; asked with
    ``now=0.0`` it tells a right token that has expired from a wrong one.
    """

    def secret_of(self, access_key_id: str) -> str | None: ...
    def accepts(self, access_key_id: str, security_token: str, now: float) -> bool: ...


class PermanentAccounts:
    """Access keys without security tokens: ``{id: secret}``."""

    def __init__(self, secrets: Mapping[str, str] = DEFAULT_ACCOUNTS) -> None:
        self._secrets = dict(secrets)

    def secret_of(self, access_key_id: str) -> str | None:
        return self._secrets.get(access_key_id)

    def accepts(self, access_key_id: str, security_token: str, now: float) -> bool:
        return access_key_id in self._secrets and not security_token


def _split(target: str) -> tuple[str, str]:
    """Path and query of a target as it was sent: "/path?query", or with scheme and host before it."""
    if not target.startswith("/"):
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return path, query


def _canonical_query(query: str) -> str:
    try:
        # Strictly: what is no UTF-8 would all become the same replacement character.
        pairs = sorted(parse_qsl(query, keep_blank_values=True, errors="strict"))
    except UnicodeDecodeError:
        raise InvalidParameter("the query is not UTF-8") from None
    return "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in pairs)


def sign(method: str, target: str, headers: Mapping[str, str], signed: str, secret: str) -> str:
    """The signature (hex) of a request: ``target`` is path and query as sent, ``signed`` the names joined by ";".

    ``headers`` must look names up case-insensitively, or have lower-case names.
    """
    path, query = _split(target)
    lines = "".join(f"{name}:{headers.get(name, '').strip()}\n" for name in signed.split(";"))
    content = headers.get("x-acs-content-sha256", "")
    canonical = "\n".join((method, path, _canonical_query(query), lines, signed, content))
    text = f"{ALGORITHM}\n{hashlib.sha256(canonical.encode('utf-8', 'surrogateescape')).hexdigest()}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


class Verifier:
    """Checks requests against ``accounts``. Remembers the last ``nonces_max`` nonces at most."""

    def __init__(
        self,
        accounts: Accounts | Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        nonces_max: int = NONCES_MAX,
    ) -> None:
        if accounts is None or isinstance(accounts, Mapping):
            accounts = PermanentAccounts(DEFAULT_ACCOUNTS if accounts is None else accounts)
        self._accounts: Accounts = accounts
        self._clock = clock
        self._nonces_max = nonces_max
        self._nonces: collections.OrderedDict[tuple[str, str], float] = collections.OrderedDict()
        self._lock = threading.Lock()

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> str:
        """The access key id that signed. Raises the errors named at the top; none holds anything of a credential."""
        found = _AUTHORIZATION.fullmatch(headers.get("Authorization", ""))
        if found is None:
            raise MissingAuthorization(f"the control plane wants Authorization: {ALGORITHM} Credential=…")
        key, signed = found["key"], found["headers"].split(";")
        wanted = {*_REQUIRED, *(name.lower() for name in headers if name.lower().startswith("x-acs-"))}
        if absent := sorted(name for name in wanted if name not in signed or name not in headers):
            raise IncompleteSignature(f"these headers must be sent and signed: {', '.join(absent)[:300]}")
        if signed != sorted(set(signed)):
            raise IncompleteSignature("SignedHeaders must be sorted, each name once")
        secret = self._accounts.secret_of(key)
        if secret is None:
            raise UnknownAccessKeyId("the access key id is unknown, or its temporary credential is gone")
        if not hmac.compare_digest(sign(method, target, headers, found["headers"], secret), found["signature"]):
            raise SignatureDoesNotMatch("the signature differs from the one calculated here: wrong secret, or changed")
        now = self._clock()
        sent_s = _seconds(headers["x-acs-date"])
        if abs(now - sent_s) > WINDOW_S:
            raise ExpiredTimeStamp(f"x-acs-date is {sent_s - now:+.0f} s off, over {WINDOW_S:g}: set the clock")
        self._check_token(key, headers.get("x-acs-security-token", ""), now)
        self._use_nonce(key, headers["x-acs-signature-nonce"], now)
        return key

    def _check_token(self, key: str, token: str, now: float) -> None:
        if self._accounts.accepts(key, token, now):
            return
        if not token:
            raise MissingSecurityToken("this access key is temporary: send its security token too")
        if self._accounts.accepts(key, token, 0.0):
            raise ExpiredSecurityToken("the security token has expired: fetch a fresh credential")
        raise MismatchedSecurityToken("the security token does not belong to this access key")

    def _use_nonce(self, key: str, nonce: str, now: float) -> None:
        if not 1 <= len(nonce) <= NONCE_CHARS_MAX:
            raise IncompleteSignature(f"x-acs-signature-nonce: want 1 to {NONCE_CHARS_MAX} characters")
        with self._lock:
            while self._nonces and next(iter(self._nonces.values())) < now:
                self._nonces.popitem(last=False)
            if (key, nonce) in self._nonces:
                raise SignatureNonceUsed("this nonce was used already: sign every request anew")
            # Until then the same request would still be within the date window. Twice the window covers every order
            # of dates, so that the oldest entry is the first to go.
            self._nonces[key, nonce] = now + 2 * WINDOW_S
            while len(self._nonces) > self._nonces_max:
                self._nonces.popitem(last=False)


def check_content(headers: Mapping[str, str], body: bytes | memoryview) -> None:
    """Raise SignatureDoesNotMatch unless the body is the one that was signed."""
    if hashlib.sha256(body).hexdigest() != headers.get("x-acs-content-sha256", "").lower():
        raise SignatureDoesNotMatch("x-acs-content-sha256 is not the SHA-256 of the body")


def _seconds(text: str) -> float:
    try:
        return datetime.strptime(text + "+0000", "%Y-%m-%dT%H:%M:%SZ%z").timestamp()
    except ValueError:
        raise MalformedTimeStamp("x-acs-date: want YYYY-MM-DDThh:mm:ssZ") from None

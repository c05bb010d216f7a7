"""What an error of the store means for a retry, and what of its text people may read.

Errors come from SDKs that say more or less: attributes (`retriable`, `status`, `code`, `retry_after_s`), or text only.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import deque
from typing import Any
from urllib.parse import quote

SECRET_VARIABLES = (
    "ALIBABA_CLOUD_ACCESS_KEY_ID",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
    "ALIBABA_CLOUD_SECURITY_TOKEN",
    "FEATUREDB_PASSWORD",
    "AWS_ACCESS_KEY_ID",  # of shards on s3://
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
TEXT_MAX = 300
PREFIX = 8  # characters of a longer secret by which it is known when somebody cut it off
_remembered: deque[str] = deque(maxlen=64)  # of this process: tokens come and go, the last few may still be quoted

_LABELLED = re.compile(  # not "InvalidToken: …", which is a code
    r"(?i)(\b(?!invalid|missing|expired)(?:auth|authorization|signature|\w*(?:token|password|secret|access_?key_?id))\b"
    r"\W{0,4}[:=]\W{0,4})(?:\w[\w-]* )?[^\s,;]+"
)
_IN_URL = re.compile(r"(\w://)[^\s/?#@]*@|(\w://[^\s?#\"']*\?)[^\s\"'#]+")
_STATUS = re.compile(r"\b[45]\d\d\b(?! (?:rows|records|batches|bytes|ms)\b)")
_EXPIRED = re.compile(r"(?i)invalid_?token\b|security_?token\W{0,2}expired|expired_?token|token (?:has |is )?expired")
# A mistake in the request or in the program, which the next attempt would make again.
_FATAL = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, PermissionError)


class PublisherError(RuntimeError):
    """The publisher was set up or used in a way that could lose rows. The message says what to do.

    `retriable`: what was missing may be there in a moment.
    """

    def __init__(self, what: str, *, retriable: bool = False) -> None:
        super().__init__(what)
        self.retriable = retriable


def is_retriable(error: object) -> bool:
    """Whether another attempt can succeed: the SDK's own word, else the HTTP status, else the kind of exception."""
    if (said := getattr(error, "retriable", None)) is not None:
        return bool(said)
    if (status := _status(error)) is not None:
        return status >= 500 or status in (408, 429)
    return not isinstance(error, _FATAL)


def is_expired(error: object) -> bool:
    """Whether a fresh credential can help: HTTP 401, or the code or text of an expired token; never 403, a refusal."""
    status = _status(error)
    return status == 401 or (status != 403 and bool(_EXPIRED.search(f"{getattr(error, 'code', '')} {_text(error)}")))


def wrapped(what: str, error: Exception) -> PublisherError:
    """An error of ours in place of an SDK's, to be raised outside the handler: not even its context quotes a secret."""
    retriable = is_retriable(error) or is_expired(error)
    return PublisherError(f"{what}: {type(error).__name__}: {redact(error)}", retriable=retriable)


def retry_after_s(error: object) -> float | None:
    """Seconds the store asked to be left alone for; None when it asked for nothing, or in words."""
    wait_s: Any = getattr(error, "retry_after_s", None)
    try:
        return max(0.0, float(wait_s))
    except (TypeError, ValueError):
        return None


def remember(*secrets: str | None) -> None:
    """Have `redact` know these too: what a credential chain returned stands in no environment variable."""
    _remembered.extend(secret for secret in secrets if secret and secret not in _remembered)


def redact(error: object, length_max: int = TEXT_MAX) -> str:
    """Text of an error, short, without known secrets (plain or encoded) and what bears a telling label."""
    text = _text(error)
    known = {*map(os.environ.get, SECRET_VARIABLES), *_remembered}
    for secret in sorted(filter(None, known), key=len, reverse=True):
        if len(secret) > 3:  # shorter ones would tear words apart
            text = _pattern(secret).sub("[redacted]", text)
    text = _IN_URL.sub(r"\1\2[redacted]", _LABELLED.sub(r"\1[redacted]", text))
    return text if len(text) <= length_max else text[:length_max] + "…"


def _text(error: object) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # an error that cannot be told must not become another one, in the thread that reports it
        return type(error).__name__


def _pattern(secret: str) -> re.Pattern[str]:
    """Matches the secret as it is, and as headers, URLs, JSON and `repr` write it; a long one also when cut off."""
    forms = {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    forms.add(base64.b64encode(secret.encode()).decode())
    cut = {form[:PREFIX] for form in forms if len(form) >= 2 * PREFIX}
    whole = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    return re.compile(whole + "".join(rf"|{re.escape(form)}\S*" for form in sorted(cut)))


def _status(error: object) -> int | None:
    for name in ("status", "status_code", "statusCode"):
        if isinstance(status := getattr(error, name, None), int):
            return status
    found = _STATUS.search(error) if isinstance(error, str) else None
    return int(found[0]) if found else None

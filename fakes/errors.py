"""Every error of the fakes, in one table: its HTTP status and whether the write behind it happened.

Retry logic, the request log, the properties and the docs read ``ERRORS``; nothing else decides what an error means.
``applied`` is what a client may conclude from the error alone: "no" (surely not applied), "yes" (surely applied)
or "unknown" (perhaps applied: only a replay with a newer ts makes it certain).

    FakeError
    ├── Refused                     the request is wrong; sending it again cannot help
    │   ├── InvalidParameter, InvalidVersion, InvalidTimestamp, MalformedBody, SchemaMismatch,
    │   │   ReservedKey, NonFiniteValue, DimensionMismatch, BodyTooLarge, RequestTimeout
    │   ├── MissingAuthorization, InvalidToken, AccessDenied
    │   ├── IncompleteSignature, SignatureDoesNotMatch, SignatureNonceUsed, UnknownAccessKeyId, MalformedTimeStamp,
    │   │   ExpiredTimeStamp, MissingSecurityToken, MismatchedSecurityToken, ExpiredSecurityToken
    │   ├── ProjectNotFound, EntityNotFound, ViewNotFound, SnapshotNotFound, DatasourceNotFound,
    │   │   InstanceNotFound, RouteNotFound, MethodNotAllowed
    │   └── AlreadyExists, InUse
    └── Injected                    a planned fault answered instead of the store (code chosen by ``code_for_status``)
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar, Final, Literal

import msgspec

Applied = Literal["no", "yes", "unknown"]
MESSAGE_CHARS_MAX: Final = 1000


class ErrorSpec(msgspec.Struct, frozen=True):
    """One row of the table. ``status`` is the HTTP status, or None when no reply was received at all."""

    code: str
    status: int | None
    applied: Applied
    retriable: bool
    meaning: str


_ROWS: Final = (
    ErrorSpec("InvalidParameter", 400, "no", False, "a parameter is missing, malformed or out of range"),
    ErrorSpec("InvalidVersion", 400, "no", False, "the version is absent, empty or not printable"),
    ErrorSpec("InvalidTimestamp", 400, "no", False, "ts is not a positive int64 number of milliseconds"),
    ErrorSpec("MalformedBody", 400, "no", False, "the body cannot be decoded"),
    ErrorSpec("SchemaMismatch", 400, "no", False, "columns or types differ from the view's, or a value is null"),
    ErrorSpec("ReservedKey", 400, "no", False, "key -1 is reserved"),
    ErrorSpec("NonFiniteValue", 400, "no", False, "an embedding holds NaN or an infinity"),
    ErrorSpec("DimensionMismatch", 400, "no", False, "an embedding's length differs from its table's first row"),
    ErrorSpec("MissingAuthorization", 401, "no", False, "no usable Authorization or Auth header"),
    # Codes of Alibaba's gateway, from here to InvalidSecurityToken.Expired.
    ErrorSpec("IncompleteSignature", 400, "no", False, "a header that must be signed is absent or not signed"),
    ErrorSpec("InvalidAccessKeyId.NotFound", 404, "no", False, "no such access key"),
    ErrorSpec("SignatureDoesNotMatch", 400, "no", False, "signed with another secret, or changed on the way"),
    ErrorSpec("SignatureNonceUsed", 400, "no", True, "the same signed request came before: sign anew"),
    ErrorSpec("InvalidTimeStamp.Format", 400, "no", False, "x-acs-date is not a UTC time in ISO 8601"),
    ErrorSpec("InvalidTimeStamp.Expired", 400, "no", False, "x-acs-date is over 15 minutes off: set the clock"),
    ErrorSpec("MissingSecurityToken", 400, "no", False, "a temporary access key came without its token"),
    ErrorSpec("InvalidSecurityToken.MismatchWithAccessKey", 400, "no", False, "the token is of another access key"),
    ErrorSpec("InvalidSecurityToken.Expired", 400, "no", True, "the token has expired: fetch a fresh credential"),
    ErrorSpec("InvalidToken", 401, "no", True, "the datasource token does not match: read it again"),
    ErrorSpec("AccessDenied", 403, "no", False, "the account may not do this"),
    ErrorSpec("RouteNotFound", 404, "no", False, "no such route"),
    ErrorSpec("InstanceNotFound", 404, "no", False, "no such instance"),
    ErrorSpec("ProjectNotFound", 404, "no", False, "no such project"),
    ErrorSpec("EntityNotFound", 404, "no", False, "no such feature entity"),
    ErrorSpec("ViewNotFound", 404, "no", False, "no such feature view"),
    ErrorSpec("SnapshotNotFound", 404, "no", False, "no such snapshot, or it was dropped for newer ones"),
    ErrorSpec("DatasourceNotFound", 404, "no", False, "no such datasource"),
    ErrorSpec("MethodNotAllowed", 405, "no", False, "the route exists, but not for this method"),
    ErrorSpec("RequestTimeout", 408, "no", True, "the body did not arrive in time"),
    ErrorSpec("AlreadyExists", 409, "no", False, "an object of that name exists"),
    ErrorSpec("InUse", 409, "no", False, "other objects still refer to it"),
    ErrorSpec("BodyTooLarge", 413, "no", False, "the body, or the reply it asks for, is over the limit"),
    ErrorSpec("BadRequest", 400, "no", False, "refused for a reason the client does not know"),
    ErrorSpec("Throttling", 429, "no", True, "too many requests; nothing was applied; Retry-After says when"),
    ErrorSpec("PartialFailure", 207, "no", True, "some rows were applied; the error counts those that were not"),
    ErrorSpec("InternalError", 500, "unknown", True, "the server failed, perhaps after the commit"),
    ErrorSpec("BadGateway", 502, "unknown", True, "something between client and store failed"),
    ErrorSpec("ServiceUnavailable", 503, "unknown", True, "unavailable, perhaps after the commit"),
    ErrorSpec("GatewayTimeout", 504, "unknown", True, "something between client and store gave up waiting"),
    ErrorSpec("NoCredential", None, "no", True, "no credential could be fetched, so nothing was sent"),
    ErrorSpec("ConnectFailed", None, "no", True, "no connection was made, so nothing was sent"),
    ErrorSpec("ConnectionLost", None, "unknown", True, "the connection broke before a reply"),
    ErrorSpec("ReadTimeout", None, "unknown", True, "no reply in time"),
    ErrorSpec("ReplyTruncated", None, "yes", True, "a success reply began, then broke off: the commit came before it"),
    ErrorSpec("NotSent", None, "no", True, "dropped from the client's queue before it was sent"),
    ErrorSpec("ClientBug", None, "unknown", False, "the client library itself failed"),
)
ERRORS: Final[dict[str, ErrorSpec]] = {row.code: row for row in _ROWS}
_BY_STATUS: Final = {
    400: "BadRequest",
    401: "InvalidToken",
    403: "AccessDenied",
    404: "RouteNotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    409: "AlreadyExists",
    413: "BodyTooLarge",
    429: "Throttling",
    500: "InternalError",
    502: "BadGateway",
    503: "ServiceUnavailable",
    504: "GatewayTimeout",
}


def code_for_status(status: int) -> str:
    """The code for a bare HTTP status (4xx: surely not applied; 5xx: unknown), for replies that carry no code."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return "InternalError" if status >= 500 else "BadRequest"


def shown(text: str) -> str:
    """``text`` as errors and logs show it: at most ``MESSAGE_CHARS_MAX`` characters of it, all of them valid Unicode.

    Messages quote what a client sent: names of any length, lone surrogates.
    """
    if len(text) > MESSAGE_CHARS_MAX:
        text = f"{text[: MESSAGE_CHARS_MAX - 40]}… (cut: {len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()


def disk_failure(error: OSError, route: str) -> str:
    """What a client is told when the store's folder fails: why, but not where it is."""
    return f"the store's folder failed in route {route}: {os.strerror(error.errno or errno.EIO)}"


class FakeError(Exception):
    """Base of all errors the fakes raise. ``code`` is looked up in ``ERRORS``: ``dotted``, else the class name."""

    dotted: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))

    @property
    def code(self) -> str:
        return self.dotted or type(self).__name__

    @property
    def spec(self) -> ErrorSpec:
        return ERRORS[self.code]


class Refused(FakeError):
    """The request is wrong; the same request will be refused again. Nothing was applied."""


class InvalidParameter(Refused):
    """A parameter is missing, malformed or out of range."""


class InvalidVersion(Refused):
    """The version is absent, empty, too long or not printable: name the version you publish to."""


class InvalidTimestamp(Refused):
    """ts is not a positive int64 number of milliseconds."""


class MalformedBody(Refused):
    """The body cannot be decoded. Usual causes: a truncated or compressed Arrow stream, JSON with NaN."""


class SchemaMismatch(Refused):
    """Columns or types differ from the view's, or a value is null."""


class ReservedKey(Refused):
    """Key -1 is reserved (an empty slot in dynamic tables): it must never be published."""


class NonFiniteValue(Refused):
    """An embedding holds NaN or an infinity. Usual cause: training diverged, or unset memory was gathered."""


class DimensionMismatch(Refused):
    """An embedding's length differs from the first row written under that embedding_name in that version."""


class BodyTooLarge(Refused):
    """The body, or the reply that it asks for, is over the server's limit: send smaller batches, ask for fewer rows."""


class RequestTimeout(Refused):
    """The body did not arrive in time."""


class MissingAuthorization(Refused):
    """No usable Authorization or Auth header."""


class IncompleteSignature(Refused):
    """A header that must be signed is absent or not signed."""


class UnknownAccessKeyId(Refused):
    """No such access key. Usual cause: another key than the server's accounts, or a temporary one that is gone."""

    dotted = "InvalidAccessKeyId.NotFound"


class SignatureDoesNotMatch(Refused):
    """Signed with another secret, or changed on the way (a proxy that rewrites headers does that)."""


class SignatureNonceUsed(Refused):
    """The same signed request came before."""


class MalformedTimeStamp(Refused):
    """x-acs-date is not a UTC time in ISO 8601."""

    dotted = "InvalidTimeStamp.Format"


class ExpiredTimeStamp(Refused):
    """x-acs-date is more than 15 minutes from the server's clock, in either direction."""

    dotted = "InvalidTimeStamp.Expired"


class MissingSecurityToken(Refused):
    """A temporary access key came without its token."""


class MismatchedSecurityToken(Refused):
    """The token does not belong to the access key."""

    dotted = "InvalidSecurityToken.MismatchWithAccessKey"


class ExpiredSecurityToken(Refused):
    """The token has expired: fetch a fresh credential, and make a client from it."""

    dotted = "InvalidSecurityToken.Expired"


class InvalidToken(Refused):
    """The datasource token does not match: read it again from the FeatureDB datasource, as every new client does."""


class AccessDenied(Refused):
    """The account may not do this."""


class RouteNotFound(Refused):
    """No such route."""


class MethodNotAllowed(Refused):
    """The route exists, but not for this method."""


class InstanceNotFound(Refused):
    """No such instance."""


class ProjectNotFound(Refused):
    """No such project."""


class EntityNotFound(Refused):
    """No such feature entity."""


class ViewNotFound(Refused):
    """No such feature view. Usual cause: opened before rank 0 created it."""


class SnapshotNotFound(Refused):
    """No such snapshot, or it was dropped for newer ones: take a new one."""


class DatasourceNotFound(Refused):
    """No such datasource."""


class AlreadyExists(Refused):
    """An object of that name exists."""


class InUse(Refused):
    """Other objects still refer to it."""


class Injected(FakeError):
    """A planned status fault: answered instead of the store, or after it had committed."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        return code_for_status(self.status)

"""An object store for retained shards: moto's S3 on a free loopback port, with planned errors in front of it.

Needs the ``test`` extra (moto). Public: S3's REST operations and its error documents; what the client may conclude
from an error is in ``OBJECT_ERRORS``, in the words of errors.py. Two facts of S3 that faults here rest on:

- Arrow's ``open_output_stream`` writes even a small file as a multipart upload; nothing is visible under the key until
  CompleteMultipartUpload. A broken upload leaves its parts behind, invisible.
- CompleteMultipartUpload may answer 200 with an error document in the body, when it fails after the headers went out
  (``ErrorFault(in_reply=True)``). A client that looks at the status alone takes that for success.

Moto keeps its objects in this process, for all stores in it: each store takes a bucket name of its own and removes its
bucket when it stops.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self
from urllib.parse import parse_qs, quote, urlencode
from xml.sax.saxutils import escape

import msgspec
import pyarrow.fs

from .errors import Applied, ErrorSpec, InvalidParameter
from .plan import Faulty, Plan, Planned
from .served import Served, reset_when_closed

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from werkzeug.serving import BaseWSGIServer

LOG_MAX: Final = 10_000
REGION: Final = "us-east-1"
ACCESS_KEY_ID: Final = "deltaproof"
SECRET_ACCESS_KEY: Final = "deltaproof-object-store"  # moto checks none
_BLOCK_BYTES: Final = 1 << 16
_RESET: Final = "deltaproof.reset"
_numbers = itertools.count(1)

Operation = Literal[
    "ListBuckets", "CreateBucket", "HeadBucket", "DeleteBucket", "ListObjects", "DeleteObjects", "GetObject",
    "HeadObject", "PutObject", "CopyObject", "DeleteObject", "CreateMultipartUpload", "UploadPart",
    "CompleteMultipartUpload", "AbortMultipartUpload", "Other",
]  # fmt: skip
# Groups of operations a fault may name, as S3's own names may be.
OPERATIONS: Final[dict[str, tuple[str, ...]]] = {
    "write": ("PutObject", "CopyObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
    "multipart": ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"),
    "read": ("GetObject", "HeadObject", "ListObjects"),
    "delete": ("DeleteObject", "DeleteObjects", "DeleteBucket", "AbortMultipartUpload"),
}
_KNOWN: Final = {"*", *OPERATIONS, *Operation.__args__}  # type: ignore[attr-defined]  # a Literal has __args__

OBJECT_ERRORS: Final[dict[str, ErrorSpec]] = {
    row.code: row
    for row in (
        ErrorSpec("SlowDown", 503, "no", True, "too many requests; nothing was applied; wait and try again"),
        ErrorSpec("InternalError", 500, "unknown", True, "the store failed, perhaps after the commit"),
        ErrorSpec("ServiceUnavailable", 503, "unknown", True, "unavailable, perhaps after the commit"),
        ErrorSpec("RequestTimeout", 400, "no", True, "the body did not arrive in time"),
        ErrorSpec("AccessDenied", 403, "no", False, "the account may not do this"),
        ErrorSpec("ExpiredToken", 400, "no", False, "the credentials have expired: get fresh ones"),
        ErrorSpec("NoSuchUpload", 404, "no", False, "the multipart upload was aborted or completed: start a new one"),
        ErrorSpec("NoSuchBucket", 404, "no", False, "no such bucket"),
        ErrorSpec("ConnectionLost", None, "unknown", True, "the connection broke before a reply"),
    )
}
When = Literal["before-commit", "after-commit"]


class MissingExtra(ImportError):
    """The object store needs moto, which the ``test`` extra brings: ``pip install 'deltaproof[test]'``."""


class ObjectFault(Planned, kw_only=True, frozen=True):
    """The requests to this store's bucket that a fault strikes.

    ``operation`` is S3's own name, a group of OPERATIONS or "*"; ``key_prefix`` begins the object's key (no bucket).
    """

    operation: str = "write"
    key_prefix: str = ""

    def check(self) -> None:
        super().check()
        self.check_known("operation", self.operation, _KNOWN)

    def matches(self, operation: str, key: str) -> bool:
        named = self.operation in ("*", operation) or operation in OPERATIONS.get(self.operation, ())
        return named and key.startswith(self.key_prefix)


class ErrorFault(ObjectFault, tag="error", kw_only=True, frozen=True):
    """Answer with an error of OBJECT_ERRORS, before or after the store did what was asked.

    ``in_reply``: status 200 and the error document as its body, as only CompleteMultipartUpload and CopyObject may.
    """

    code: str = "SlowDown"
    when: When = "before-commit"
    in_reply: bool = False

    def check(self) -> None:
        super().check()
        spec = OBJECT_ERRORS.get(self.code)
        if spec is None or spec.status is None:
            known = ", ".join(code for code, row in OBJECT_ERRORS.items() if row.status is not None)
            raise InvalidParameter(f"fault {self.id}: no error {self.code[:40]!r}; want one of {known}")
        self.check_truth(self.when, spec.applied, self.code, "InternalError or ServiceUnavailable")
        if self.in_reply and self.operation not in ("CompleteMultipartUpload", "CopyObject"):
            raise InvalidParameter(
                f"fault {self.id}: only CompleteMultipartUpload and CopyObject answer 200 with an error in the body, "
                f"not {self.operation}"
            )


class ResetFault(ObjectFault, tag="reset", kw_only=True, frozen=True):
    """Break the connection (TCP reset) instead of answering."""

    when: When = "before-commit"


class DelayFault(ObjectFault, tag="delay", kw_only=True, frozen=True):
    """Wait before or after the commit; the request then goes on as if nothing had happened."""

    STACKS: ClassVar[bool] = True

    delay_ms: float
    when: When = "before-commit"

    def check(self) -> None:
        super().check()
        self.check_range("delay_ms", self.delay_ms)


AnyObjectFault = ErrorFault | ResetFault | DelayFault


class ObjectRequest(msgspec.Struct, frozen=True):
    """One request and its fate. ``t_ms`` is monotonic; ``status`` 0 when the connection was broken.

    ``applied`` is the truth, whatever the client was told ("unknown" only if the store itself failed). ``fault``: the
    fault that decided, if any.
    """

    seq: int
    t_ms: float
    operation: str
    key: str
    status: int
    applied: Applied
    fault: str | None


class ObjectStore(Served, Faulty[AnyObjectFault]):
    """The store: ``with ObjectStore() as objects:``, ``objects.filesystem()`` and ``objects.bucket``.

    Raises MissingExtra where moto is not installed.
    """

    WHAT: ClassVar[str] = "object store"

    def __init__(self, bucket: str | None = None, host: str = "127.0.0.1") -> None:
        self.bucket = bucket or f"retained-{next(_numbers)}"
        self.port = 0
        self._host = host
        self._plan: Plan[AnyObjectFault] = Plan()
        self._log: collections.deque[ObjectRequest] = collections.deque(maxlen=LOG_MAX)
        self._sequence = itertools.count(1)
        self._server: BaseWSGIServer
        self._stopping = threading.Event()
        self._ours = False  # faults and the log begin after the bucket's creation and end before its removal

    def __repr__(self) -> str:
        return f"ObjectStore(bucket={self.bucket!r}, port={self.port})"

    @property
    def endpoint(self) -> str:
        """URL of the service."""
        return f"http://{self._host}:{self.port}"

    def start(self) -> Self:
        """Serve on a free port and create the bucket. Raises MissingExtra, OSError for a bucket that cannot be."""
        super().start()
        try:
            self.filesystem(allow_bucket_creation=True).create_dir(self.bucket)
        except OSError:
            self.stop()
            raise
        self._ours = True
        return self

    def stop(self) -> None:
        """Remove the bucket and stop serving. Safe to call twice."""
        self._ours = False
        self._stopping.set()
        if self._thread is not None:
            with contextlib.suppress(OSError):  # a test may have removed it
                self.filesystem(allow_bucket_deletion=True).delete_dir(self.bucket)
        super().stop()

    def _open(self) -> None:
        try:
            from moto.moto_server.werkzeug_app import create_backend_app
            from werkzeug.serving import make_server
        except ImportError as error:
            raise MissingExtra(
                f"the object store needs moto's server ({error}): pip install 'deltaproof[test]'"
            ) from error
        self._stopping.clear()
        moto = create_backend_app("s3")
        self._server = make_server(self._host, 0, self._wrap(moto), threaded=True, request_handler=_handler_class())
        # Requests stuck in a delay must not hold up the end of the process.
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self._server.block_on_close = False  # type: ignore[attr-defined]
        self.port = self._server.server_port

    def _serve(self, ready: Callable[[], None]) -> None:
        ready()  # the socket listens: who connects now waits for the loop's first turn
        self._server.serve_forever(poll_interval=0.05)

    def _halt(self) -> None:
        self._server.shutdown()

    def _close(self) -> None:
        self._server.server_close()

    def filesystem(self, *, retry_attempts_max: int = 3, **options: Any) -> pyarrow.fs.S3FileSystem:
        """Arrow's file system on this store; paths begin with the bucket (see ``path``).

        Arrow itself retries throttling, 5xx and lost connections, ``retry_attempts_max`` attempts in all, with backoff:
        1 shows every fault to the caller. ``options`` go to ``pyarrow.fs.S3FileSystem``.
        """
        return pyarrow.fs.S3FileSystem(
            access_key=ACCESS_KEY_ID,
            secret_key=SECRET_ACCESS_KEY,
            region=REGION,
            scheme="http",
            endpoint_override=f"{self._host}:{self.port}",
            retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=retry_attempts_max),
            **options,
        )

    def path(self, key: str = "") -> str:
        """``key`` as a path of ``filesystem()``."""
        return f"{self.bucket}/{key}" if key else self.bucket

    def uri(self, key: str = "") -> str:
        """``s3://`` URI of ``key`` for ``pyarrow.fs.FileSystem.from_uri``; the credentials are in ``environment()``."""
        query = urlencode({"scheme": "http", "endpoint_override": f"{self._host}:{self.port}", "region": REGION})
        return f"s3://{quote(self.path(key))}?{query}"

    def environment(self) -> dict[str, str]:
        """Variables with which Arrow, boto3 and others reach this store."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": self._host,
            "no_proxy": self._host,
        }

    def client_arguments(self) -> dict[str, str]:
        """For ``boto3.client("s3", **…)``."""
        return {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": ACCESS_KEY_ID,
            "aws_secret_access_key": SECRET_ACCESS_KEY,
            "region_name": REGION,
        }

    def requests(self) -> list[ObjectRequest]:
        """The last requests to this store's bucket and their fates, in the order in which they were answered."""
        return list(self._log)

    def _wrap(self, moto: WSGIApplication) -> WSGIApplication:
        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            operation, bucket, key = operation_of(environ)
            if bucket != self.bucket or not self._ours:
                return moto(environ, start_response)
            stacked, main, _ = self._plan.meet(lambda fault: fault.matches(operation, key))
            delays = [fault for fault in stacked if isinstance(fault, DelayFault)]
            self._wait(delays, "before-commit")
            if isinstance(main, ErrorFault | ResetFault) and main.when == "before-commit":
                _drain(environ)
                self._wait(delays, "after-commit")
                return self._fail(main, operation, key, "no", environ, start_response)
            status, headers, body = _call(moto, environ)
            code = int(status.split()[0])
            applied: Applied = "yes" if code < 300 else "unknown" if code >= 500 else "no"
            self._wait(delays, "after-commit")
            if isinstance(main, ErrorFault | ResetFault):
                return self._fail(main, operation, key, applied, environ, start_response)
            self._note(operation, key, code, applied, None)
            start_response(status, headers)
            return body

        return app

    def _fail(
        self,
        fault: ErrorFault | ResetFault,
        operation: str,
        key: str,
        applied: Applied,
        environ: WSGIEnvironment,
        start_response: StartResponse,
    ) -> Iterable[bytes]:
        if isinstance(fault, ResetFault):
            self._note(operation, key, 0, applied, fault.id)
            reset_when_closed(environ["werkzeug.socket"])
            environ[_RESET] = True
            raise ConnectionResetError(f"fault {fault.id}")
        spec = OBJECT_ERRORS[fault.code]
        status = 200 if fault.in_reply else spec.status
        assert status is not None  # checked when the fault was added
        self._note(operation, key, status, applied, fault.id)
        document = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{fault.code}</Code><Message>{escape(spec.meaning)} (fault {escape(fault.id)})</Message>"
            f"<RequestId>deltaproof</RequestId></Error>"
        ).encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(document)))]
        start_response(f"{status} {fault.code}", headers)
        return [b""] if environ["REQUEST_METHOD"] == "HEAD" else [document]

    def _wait(self, delays: Sequence[DelayFault], when: When) -> None:
        delay_s = sum(fault.delay_ms for fault in delays if fault.when == when) / 1000
        if delay_s > 0 and self._stopping.wait(delay_s):
            raise ConnectionResetError("the object store stopped while a request was delayed")

    def _note(self, operation: str, key: str, status: int, applied: Applied, fault: str | None) -> None:
        entry = ObjectRequest(next(self._sequence), time.monotonic() * 1000, operation, key, status, applied, fault)
        self._log.append(entry)


def operation_of(environ: WSGIEnvironment) -> tuple[Operation, str, str]:
    """S3's name of a path-style request, its bucket and its key ("" where it has none)."""
    method = environ["REQUEST_METHOD"]
    path = environ["PATH_INFO"].encode("latin-1").decode(errors="replace")
    bucket, _, key = path.lstrip("/").partition("/")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    return _operation(method, bucket, key, query, "HTTP_X_AMZ_COPY_SOURCE" in environ), bucket, key


def _operation(method: str, bucket: str, key: str, query: dict[str, list[str]], copies: bool) -> Operation:
    if not bucket:
        return "ListBuckets" if method == "GET" else "Other"
    if not key:
        if method == "POST" and "delete" in query:
            return "DeleteObjects"
        if query.keys() - {"list-type"} and method != "GET":
            return "Other"  # a setting of the bucket
        plain: dict[str, Operation] = {
            "PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket", "GET": "ListObjects"
        }  # fmt: skip
        return plain.get(method, "Other")
    if "uploadId" in query:
        parts: dict[str, Operation] = {
            "PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"
        }  # fmt: skip
        return parts.get(method, "Other")
    if method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "Other"
    if method == "PUT" and copies:
        return "CopyObject"
    whole: dict[str, Operation] = {
        "PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"
    }  # fmt: skip
    return whole.get(method, "Other")


def _drain(environ: WSGIEnvironment) -> None:
    """Read the request's body and forget it: a client that still sends would miss the reply."""
    stream = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):  # chunked
        while stream.read(_BLOCK_BYTES):
            pass
        return
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (block := stream.read(min(left, _BLOCK_BYTES))):
        left -= len(block)


def _call(app: WSGIApplication, environ: WSGIEnvironment) -> tuple[str, list[tuple[str, str]], list[bytes]]:
    """A whole reply of ``app``: status, headers, body. By then the store has done what was asked."""
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], info: Any = None, /) -> Callable[[bytes], object]:
        begun[:] = [(status, headers)]
        return lambda _: None

    blocks = app(environ, start)
    try:
        body = list(blocks)
    finally:
        close = getattr(blocks, "close", None)
        if close is not None:
            close()
    status, headers = begun[0]
    return status, headers, body


def _handler_class() -> Any:
    """Werkzeug's request handler (moto's own where it has one), quiet, and able to break a connection."""
    import werkzeug.serving
    from moto.moto_server import werkzeug_app

    # Moto has one of its own since 5.2: it keeps headers with underscores, which metadata keys may have.
    base: Any = getattr(werkzeug_app, "MotoRequestHandler", werkzeug.serving.WSGIRequestHandler)

    class Handler(base):
        def log_request(self, *_: Any) -> None:
            pass

        def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
            self.close_connection = True  # HTTP/1.1 would wait for the next request
            super().connection_dropped(error, environ)

        def finish(self) -> None:
            super().finish()
            if getattr(self, "environ", {}).get(_RESET):
                self.connection.close()  # now, with linger 0, so that RST goes out and no orderly end before it

    return Handler

"""The object store under Arrow's S3 file system and under boto3, with each planned error."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import urllib3
from urllib3.util import wait_for_read

from deltaproof.fakes.errors import InvalidParameter
from deltaproof.fakes.objects import (
    OBJECT_ERRORS,
    DelayFault,
    ErrorFault,
    MissingExtra,
    ObjectStore,
    ResetFault,
    operation_of,
)

TABLE = pa.table({"key_id": pa.array([1, -2, 2**63 - 1], pa.int64()), "embedding": [[0.5], [1.5], [-2.0]]})


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    """One server for the module: starting moto takes half a second."""
    with ObjectStore() as store:
        yield store


@pytest.fixture
def objects(running: ObjectStore) -> Iterator[ObjectStore]:
    yield running
    running.set_faults([])
    files = running.filesystem()
    files.delete_dir_contents(running.bucket, missing_dir_ok=True)


@pytest.fixture
def once(objects: ObjectStore) -> pyarrow.fs.S3FileSystem:
    """A file system that tries once, so that the caller sees every fault."""
    return objects.filesystem(retry_attempts_max=1)


def write(files: pyarrow.fs.S3FileSystem, path: str, body: bytes = b"body") -> None:
    with files.open_output_stream(path) as stream:
        stream.write(body)


def exists(objects: ObjectStore, key: str) -> bool:
    found: bool = objects.filesystem().get_file_info(objects.path(key)).type != pyarrow.fs.FileType.NotFound
    return found


def s3(objects: ObjectStore) -> Any:
    """A boto3 client that tries once."""
    config = botocore.config.Config(retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=10)
    return boto3.client("s3", config=config, **objects.client_arguments())


def seen_since(objects: ObjectStore, seq: int) -> list[tuple[str, int, str, str | None]]:
    return [(row.operation, row.status, row.applied, row.fault) for row in objects.requests() if row.seq > seq]


def last_seq(objects: ObjectStore) -> int:
    return objects.requests()[-1].seq if objects.requests() else 0


def test_a_parquet_shard_goes_there_and_back(objects: ObjectStore) -> None:
    files = objects.filesystem()
    pq.write_table(TABLE, objects.path("step=5/rank0.parquet"), filesystem=files)
    assert pq.read_table(objects.path("step=5/rank0.parquet"), filesystem=files).equals(TABLE)
    listed = files.get_file_info(pyarrow.fs.FileSelector(objects.path("step=5")))
    assert [entry.base_name for entry in listed] == ["rank0.parquet"]


def test_a_large_object_is_uploaded_in_parts(objects: ObjectStore) -> None:
    before = last_seq(objects)
    body = bytes(range(256)) * (44 << 10)  # 11 MiB, two parts
    write(objects.filesystem(), objects.path("large"), body)
    assert objects.filesystem().open_input_file(objects.path("large")).readall() == body
    done = [operation for operation, *_ in seen_since(objects, before)]
    assert done[:4] == ["CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload"]


def test_the_uri_and_the_environment_lead_to_the_store(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write(objects.filesystem(), objects.path("a b/c"))
    for name, value in objects.environment().items():
        monkeypatch.setenv(name, value)
    files, path = pyarrow.fs.FileSystem.from_uri(objects.uri("a b/c"))
    assert files.open_input_stream(path).read() == b"body"
    assert boto3.client("s3").head_object(Bucket=objects.bucket, Key="a b/c")["ContentLength"] == 4


def test_two_stores_of_one_process_are_apart_and_leave_nothing(objects: ObjectStore) -> None:
    write(objects.filesystem(), objects.path("mine"))
    with ObjectStore() as other:
        assert other.bucket != objects.bucket
        assert not exists(other, "mine")
        other.add_fault(ErrorFault(id="theirs", operation="*", count=100))
        write(objects.filesystem(), objects.path("mine too"))
        name = other.bucket
    assert other.fired() == {"theirs": 0}, "a store's faults struck another's bucket, or its own start and end"
    other.stop()
    assert name not in [bucket["Name"] for bucket in s3(objects).list_buckets()["Buckets"]]


@pytest.mark.parametrize("code", [code for code, row in OBJECT_ERRORS.items() if row.status is not None])
def test_each_error_has_its_status_and_code_and_nothing_is_applied_before_the_commit(
    objects: ObjectStore, code: str
) -> None:
    objects.add_fault(ErrorFault(id="planned", operation="PutObject", code=code, count=2))
    for _ in range(2):
        with pytest.raises(botocore.exceptions.ClientError) as caught:
            s3(objects).put_object(Bucket=objects.bucket, Key="k", Body=b"x" * 300_000)
        assert caught.value.response["Error"]["Code"] == code
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == OBJECT_ERRORS[code].status
    assert not exists(objects, "k")
    s3(objects).put_object(Bucket=objects.bucket, Key="k", Body=b"x")
    assert exists(objects, "k")
    assert objects.fired() == {"planned": 2}


@pytest.mark.parametrize("fault", ["InternalError", "ServiceUnavailable", "reset"])
def test_after_the_commit_the_client_is_told_of_failure_and_the_object_is_there(
    objects: ObjectStore, fault: str
) -> None:
    before = last_seq(objects)
    matching: dict[str, Any] = {"id": "planned", "operation": "PutObject", "when": "after-commit"}
    objects.add_fault(ResetFault(**matching) if fault == "reset" else ErrorFault(code=fault, **matching))
    with pytest.raises((botocore.exceptions.ClientError, botocore.exceptions.HTTPClientError)):
        s3(objects).put_object(Bucket=objects.bucket, Key="k", Body=b"x")
    assert seen_since(objects, before)[0][2:] == ("yes", "planned")
    assert exists(objects, "k")
    assert objects.fired() == {"planned": 1}


def test_a_reset_is_a_reset_and_not_an_orderly_end(objects: ObjectStore) -> None:
    objects.add_fault(ResetFault(id="reset", operation="GetObject"))
    with urllib3.PoolManager(retries=False, timeout=10) as http:
        with pytest.raises(urllib3.exceptions.ProtocolError) as caught:
            http.request("GET", f"{objects.endpoint}/{objects.bucket}/k")
        assert type(caught.value.args[1]) is ConnectionResetError  # RemoteDisconnected, of an orderly end, is one too
        assert http.request("GET", f"{objects.endpoint}/{objects.bucket}/k").status == 404


def test_faults_strike_by_operation_prefix_skip_and_count_alone(
    objects: ObjectStore, once: pyarrow.fs.S3FileSystem
) -> None:
    objects.add_fault(
        ErrorFault(id="second", operation="CompleteMultipartUpload", key_prefix="step=2/", skip=1, count=1)
    )
    failed = []
    for key in ("step=1/a", "step=2/a", "step=1/b", "step=2/b", "step=2/c", "step=22/d"):
        try:
            write(once, objects.path(key))
        except OSError:
            failed.append(key)
    assert failed == ["step=2/b"]
    (entry,) = objects.faults()
    assert (entry.seen, entry.fired) == (3, 1)


def test_faults_strike_this_store_s_bucket_alone(objects: ObjectStore) -> None:
    objects.add_fault(ErrorFault(id="all", operation="*"))
    client = s3(objects)
    client.list_buckets()
    client.create_bucket(Bucket="elsewhere")
    client.delete_bucket(Bucket="elsewhere")
    assert objects.fired() == {"all": 0}


def test_an_error_comes_after_the_body_was_read(objects: ObjectStore) -> None:
    """A client that is still sending when the connection closes sees a broken pipe and misses the error."""
    objects.add_fault(ErrorFault(id="early", operation="PutObject"))
    with socket.create_connection(("127.0.0.1", objects.port), timeout=10) as sock:
        head = f"PUT /{objects.bucket}/k HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n\r\n"
        sock.sendall(head.encode() + b"bo")
        assert not wait_for_read(sock, 0.2), "answered before the body was there"
        sock.sendall(b"dy")
        assert b" 503 " in sock.recv(100)


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_a_broken_multipart_upload_leaves_nothing_visible(
    objects: ObjectStore, once: pyarrow.fs.S3FileSystem, operation: str
) -> None:
    objects.add_fault(ErrorFault(id="broken", operation=operation, code="InternalError"))
    with pytest.raises(OSError, match=r"InternalError|INTERNAL_FAILURE"):
        write(once, objects.path("shard"))
    assert not exists(objects, "shard")
    assert objects.fired() == {"broken": 1}
    write(once, objects.path("shard"))
    assert exists(objects, "shard")


def test_a_lost_reply_to_complete_can_end_in_no_such_upload(objects: ObjectStore) -> None:
    """The trap of a retried CompleteMultipartUpload: the object is there, and the writer is told NoSuchUpload.

    S3's documentation gives that error for uploads already completed; moto answers the retry with success, so a
    second fault plays S3's part.
    """
    operation = "CompleteMultipartUpload"
    objects.add_fault(ResetFault(id="lost", operation=operation, when="after-commit"))
    objects.add_fault(ErrorFault(id="gone", operation=operation, code="NoSuchUpload", skip=1))
    with pytest.raises(OSError, match=r"NoSuchUpload|NO_SUCH_UPLOAD"):
        write(objects.filesystem(retry_attempts_max=3), objects.path("shard"))
    assert exists(objects, "shard")
    assert objects.fired() == {"lost": 1, "gone": 1}


def test_complete_may_fail_inside_a_success_reply(objects: ObjectStore, once: pyarrow.fs.S3FileSystem) -> None:
    fault = ErrorFault(id="inside", operation="CompleteMultipartUpload", code="InternalError", in_reply=True)
    objects.add_fault(fault)
    with pytest.raises(OSError, match=r"InternalError|INTERNAL_FAILURE"):
        write(once, objects.path("shard"))
    assert not exists(objects, "shard")
    assert [row.status for row in objects.requests() if row.fault == "inside"] == [200]


def test_arrow_hides_a_few_errors_by_retrying(objects: ObjectStore) -> None:
    objects.add_fault(ErrorFault(id="slow down", operation="UploadPart", count=2))
    write(objects.filesystem(retry_attempts_max=3), objects.path("shard"))
    assert exists(objects, "shard")
    assert objects.fired() == {"slow down": 2}


@pytest.mark.parametrize("when", ["before-commit", "after-commit"])
def test_a_delay_waits_and_lets_the_other_fault_apply(objects: ObjectStore, when: Any) -> None:
    objects.add_fault(DelayFault(id="late", operation="write", delay_ms=300, when=when))
    objects.add_fault(ErrorFault(id="failed", operation="PutObject"))
    started = time.monotonic()
    with pytest.raises(botocore.exceptions.ClientError):
        s3(objects).put_object(Bucket=objects.bucket, Key="k", Body=b"x")
    assert time.monotonic() - started >= 0.3
    assert objects.fired() == {"late": 1, "failed": 1}


def test_a_bucket_that_cannot_be_leaves_no_server_behind() -> None:
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="InvalidBucketName"):
        ObjectStore("x" * 100).start()
    assert not {thread for thread in set(threading.enumerate()) - before if "object store" in thread.name}


def test_stopping_does_not_wait_for_a_delayed_request_and_ends_it() -> None:
    with ObjectStore() as store:
        threads = set(threading.enumerate())
        store.add_fault(DelayFault(id="late", operation="*", delay_ms=60_000))
        with urllib3.PoolManager(retries=False, timeout=0.2) as http, pytest.raises(urllib3.exceptions.HTTPError):
            http.request("GET", f"{store.endpoint}/{store.bucket}/k")
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert store.fired() == {"late": 1}
    while set(threading.enumerate()) - threads:
        assert time.monotonic() - started < 10, "the delayed request lives on"
        time.sleep(0.01)


def test_impossible_faults_are_refused(objects: ObjectStore) -> None:
    for fault in (
        ErrorFault(id=""),
        ErrorFault(id="a", operation="PutObjekt"),
        ErrorFault(id="a", code="Nonsense"),
        ErrorFault(id="a", code="ConnectionLost"),
        ErrorFault(id="a", code="SlowDown", when="after-commit"),
        ErrorFault(id="a", operation="PutObject", in_reply=True),
        DelayFault(id="a", delay_ms=float("nan")),
        ResetFault(id="a", skip=-1),
    ):
        with pytest.raises(InvalidParameter, match="fault"):
            objects.add_fault(fault)


@pytest.mark.parametrize(
    ("method", "target", "operation", "key"),
    [
        ("GET", "/", "ListBuckets", ""),
        ("PUT", "/b", "CreateBucket", ""),
        ("PUT", "/b?versioning", "Other", ""),
        ("GET", "/b/?list-type=2&prefix=x", "ListObjects", ""),
        ("POST", "/b?delete", "DeleteObjects", ""),
        ("PUT", "/b/k/l", "PutObject", "k/l"),
        ("PUT", "/b/\xc3\xa9", "PutObject", "é"),
        ("POST", "/b/k?uploads", "CreateMultipartUpload", "k"),
        ("PUT", "/b/k?partNumber=1&uploadId=u", "UploadPart", "k"),
        ("POST", "/b/k?uploadId=u", "CompleteMultipartUpload", "k"),
        ("DELETE", "/b/k?uploadId=u", "AbortMultipartUpload", "k"),
        ("PATCH", "/b/k", "Other", "k"),
    ],
)
def test_requests_are_named_as_s3_names_them(method: str, target: str, operation: str, key: str) -> None:
    path, _, query = target.partition("?")
    assert operation_of({"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query})[::2] == (operation, key)
    copied = {"REQUEST_METHOD": "PUT", "PATH_INFO": "/b/k", "HTTP_X_AMZ_COPY_SOURCE": "/b/j"}
    assert operation_of(copied)[0] == "CopyObject"


def test_without_moto_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moto.moto_server.werkzeug_app", None)
    with pytest.raises(MissingExtra, match=r"pip install 'deltaproof\[test\]'"):
        ObjectStore().start()

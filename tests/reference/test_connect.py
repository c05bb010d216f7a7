"""Credentials: the real default chain on the fake credential endpoint, the fake store over HTTP, and what leaks."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alibabacloud_credentials.utils import auth_constant, auth_util

from deltaproof.fakes import feature_store_py
from deltaproof.fakes.credentials import CredentialServer, Garbage, Refusal, Reset
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import StatusFault, TokenRevokedFault
from deltaproof.reference.connect import _discreet, _said, connect
from deltaproof.reference.errors import PublisherError
from deltaproof.reference.publisher import Publisher
from deltaproof.reference.uploader import UploadError

T = "m.ebc.embedding_bags.t"
PASSWORD = "pass+word/of=rank0"


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CredentialServer]:
    """The endpoint, as the only source of the default chain in this process, and the SDK's facade as the SDK."""
    monkeypatch.setitem(sys.modules, "feature_store_py", feature_store_py)
    monkeypatch.setenv("FEATUREDB_USERNAME", "rank0")
    monkeypatch.setenv("FEATUREDB_PASSWORD", PASSWORD)
    monkeypatch.setattr(auth_constant, "HOME", str(tmp_path))
    with CredentialServer() as running:
        monkeypatch.setattr(auth_util, "environment_credentials_uri", running.uri)
        yield running


@pytest.fixture
def server(credentials: CredentialServer) -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer(accounts=credentials) as running:
        yield running


@pytest.fixture
def emitted(
    credentials: CredentialServer, caplog: pytest.LogCaptureFixture, capfd: Any, tmp_path: Path
) -> Iterator[list[str]]:
    """Texts a test collects; at its end these, all logs, both streams and all files are searched for secrets."""
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    yield texts
    files = [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    everything = "\n".join([*texts, *files, caplog.text, *capfd.readouterr()])
    for secret in {*credentials.vault.secrets(), PASSWORD}:
        assert secret not in everything
        assert secret[:20] not in everything


def publisher_on(kit: Any, server: FeatureStoreServer, **changes: Any) -> tuple[Any, Publisher]:
    source = kit.source({("m.ebc", "ebc", "t"): (60, 2, "row_wise")})
    settings = kit.settings(project="deltaproof", batch_size=7, max_workers=3, endpoint=server.endpoint, **changes)
    made = Publisher(
        source, None, settings, rank=0, world_size=1, barrier=lambda: None, connect=lambda: connect(settings)
    )
    return source, made


def train(source: Any, publisher: Publisher, first: int, last: int) -> None:
    for step in range(first, last + 1):
        source.train(T, list(range(step, 60, 3)), float(step))
        publisher.after_step(step)


def stored(server: FeatureStoreServer) -> dict[int, list[float]]:
    view = server.store.snapshot("deltaproof", "v", "v1").table()
    return dict(zip(view["sk"].to_pylist(), view["embedding"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    "fault",
    [
        None,
        Refusal(id="refusal", status=503, count=2),
        Reset(id="reset", count=2),
        Garbage(id="quotes-a-live-token", what="no-expiration", count=2),
        Garbage(id="cut", what="truncated", count=1),
    ],
    ids=lambda fault: fault.id if fault else "none",
)
def test_an_expired_token_is_replaced_from_the_real_chain_and_nothing_is_lost(
    kit: Any, credentials: CredentialServer, server: FeatureStoreServer, emitted: list[str], fault: Any, tmp_path: Path
) -> None:
    """The credential and the store's token are revoked in mid-run, and the endpoint stutters when asked for another."""
    source, publisher = publisher_on(kit, server, retain=str(tmp_path / "retained"))
    with publisher:
        publisher.start()
        train(source, publisher, 1, 6)
        credentials.vault.revoke()
        if fault is not None:
            credentials.add_fault(fault)
        server.add_fault(TokenRevokedFault(id="revoked"))
        train(source, publisher, 7, 12)
        publisher.finish(12)
        emitted += map(repr, [publisher, publisher.uploader, publisher.uploader.metrics(), publisher.state_dict(12)])
        assert publisher.uploader.counters["reconnects"] == 1
    assert len(list((tmp_path / "retained").rglob("*.parquet"))) == 3
    assert credentials.vault.issued == 2
    assert fault is None or credentials.fired() == {fault.id: fault.count}
    assert stored(server) == {key: source.weights[T][key].tolist() for key in range(1, 60)}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Garbage(id="quotes-a-live-token", what="no-expiration", count=99), "result: \\[redacted\\]"),
        (Refusal(id="refusal", status=403, count=99), "URLCredentialsProvider.*403"),
    ],
    ids=["quotes-a-live-token", "refusal"],
)
def test_an_endpoint_that_never_gives_another_token_ends_the_job_with_the_steps_named(
    kit: Any,
    credentials: CredentialServer,
    server: FeatureStoreServer,
    emitted: list[str],
    fault: Any,
    said: str,
    tmp_path: Path,
) -> None:
    source, publisher = publisher_on(kit, server, retry_attempts_max=3, spill=str(tmp_path / "spilled"))
    publisher.start()
    credentials.add_fault(fault)
    server.add_fault(TokenRevokedFault(id="revoked"))
    train(source, publisher, 1, 5)
    with pytest.raises(UploadError, match=said) as caught:
        publisher.finish(5)
    assert caught.value.unacknowledged == (5,)
    assert publisher.uploader.counters["retries"] == 2
    with pytest.raises(UploadError, match=r"59 of the rows were spilled"):
        publisher.close(drain=False)
    assert len(list((tmp_path / "spilled").rglob("*.parquet"))) == 1
    emitted += [str(caught.value), repr(caught.value)]


def test_a_refusal_is_not_taken_for_an_expired_token(
    kit: Any, credentials: CredentialServer, server: FeatureStoreServer
) -> None:
    source, publisher = publisher_on(kit, server)
    publisher.start()
    server.add_fault(StatusFault(id="no", code=403, count=100))
    train(source, publisher, 1, 5)
    with pytest.raises(UploadError, match=r"403|AccessDenied"):
        publisher.finish(5)
    assert publisher.uploader.counters["reconnects"] == 0
    assert server.faults()[0].fired <= 3
    assert credentials.vault.issued == 1


def test_a_token_that_is_refused_again_and_again_is_not_retried_for_ever(
    kit: Any, server: FeatureStoreServer, emitted: list[str]
) -> None:
    source, publisher = publisher_on(kit, server, retry_attempts_max=4)
    publisher.start()
    server.add_fault(StatusFault(id="never-good", code=401, count=1000))
    train(source, publisher, 1, 5)
    with pytest.raises(UploadError, match=r"401|InvalidToken") as caught:
        publisher.finish(5)
    assert publisher.uploader.counters["reconnects"] == 3
    emitted.append(repr(caught.value))


@pytest.mark.parametrize("what", ["no-expiration", "no-secret", "not-json", "empty", "bad-expiration"])
def test_no_reply_of_the_credential_endpoint_is_quoted(
    kit: Any, credentials: CredentialServer, emitted: list[str], what: Any
) -> None:
    credentials.add_fault(Garbage(id="x", what=what, count=99))
    with pytest.raises(PublisherError, match="no credential in the default chain") as caught:
        connect(kit.settings(endpoint="127.0.0.1:1"))
    assert caught.value.retriable
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert not logging.getLogger("credentials").filters
    emitted += [str(caught.value), repr(caught.value)]


def test_only_what_the_credential_package_logs_for_us_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("credentials")
    with _discreet():
        thread = threading.Thread(target=logger.warning, args=("of another thread",))
        thread.start()
        thread.join()
        logger.warning("of ours")
    logger.warning("after it")
    assert caplog.messages == ["of another thread", "after it"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a" + "b" * 199, "a" + "b" * 199),
        ("a" + "b" * 200, "…" + "b" * 200),
        ("a" * 9_900 + "b" * 100, "…" + "a" * 100 + "b" * 100),
        ("a" * 9_900 + "b" * 101, "…" + "a" * 99 + "b" * 100 + "…"),
    ],
    ids=["short", "long", "longest", "cut at both ends"],
)
def test_of_what_the_chain_says_the_end_is_shown(text: str, shown: str) -> None:
    assert _said(ValueError(text)) == f"ValueError: {shown}"


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("feature_store_py", r"install Alibaba's SDK or, for the fake store, call .*install\(\) first"),
        ("alibabacloud_credentials.client", "install it"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_remedy(
    kit: Any, monkeypatch: pytest.MonkeyPatch, package: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "feature_store_py", feature_store_py)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PublisherError, match=rf"^{package} is not installed, and .* the store: {remedy}$") as caught:
        connect(kit.settings())
    assert not caught.value.retriable


@pytest.mark.parametrize("variable", ["FEATUREDB_USERNAME", "FEATUREDB_PASSWORD"])
def test_a_missing_login_is_named_before_anything_is_asked_for(
    kit: Any, credentials: CredentialServer, monkeypatch: Any, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(PublisherError, match="set FEATUREDB_USERNAME and FEATUREDB_PASSWORD") as caught:
        connect(kit.settings(endpoint="127.0.0.1:1"))
    assert not caught.value.retriable
    assert not credentials.vault.secrets()


class Unauthorized(Exception):
    status = 401


@pytest.mark.parametrize(
    ("error", "retriable"),
    [
        (ConnectionResetError("token=abcdef is no good"), True),
        (ValueError("no region"), False),
        (feature_store_py.TransportError("InvalidSecurityToken.Expired", "the token has expired"), True),
        (Unauthorized("who are you?"), True),
        (feature_store_py.TransportError("AccessDenied", "go away"), False),
    ],
)
def test_an_sdk_that_makes_no_client_is_told_apart_without_its_secrets(
    kit: Any, credentials: CredentialServer, monkeypatch: Any, error: Exception, retriable: bool
) -> None:
    def refuse(**how: Any) -> None:
        error.args = (" ".join([error.args[0], *how.values()]),)
        raise error

    monkeypatch.setattr(feature_store_py, "FeatureStoreClient", refuse)
    with pytest.raises(PublisherError, match=f"no client could be made: {type(error).__name__}") as caught:
        connect(kit.settings(endpoint="127.0.0.1:1"))
    assert caught.value.retriable is retriable
    assert caught.value.__cause__ is caught.value.__context__ is None
    frames, traceback = [], caught.value.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    held = repr([frame.f_locals for frame in frames if frame.f_code.co_filename != __file__])
    for secret in {*credentials.vault.secrets(), PASSWORD}:
        assert secret not in f"{caught.value}{held}"

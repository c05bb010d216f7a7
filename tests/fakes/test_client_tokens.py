"""Credentials and tokens that expire or are revoked: each new client in a process fetches fresh ones, and so does
``refresh``; until then writes fail as surely not applied.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from alibabacloud_credentials.utils import auth_util

from deltaproof.fakes.credentials import CredentialServer, Garbage, Refusal, TokenVault
from deltaproof.fakes.feature_store_py import FeatureStoreClient, TransportError
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import StatusFault, TokenRevokedFault

from .kit import PROJECT, VERSION, VIEW, Backend, make_view, sdk_rows

BATCH = sdk_rows(["t"], [1], [[1.0]])
LOGIN: dict[str, Any] = {"featuredb_username": "rank0", "featuredb_password": "password"}


def only_source(monkeypatch: pytest.MonkeyPatch, endpoint: CredentialServer) -> None:
    """Make the endpoint the only source of the default chain, as if variables had said so at the package's import."""
    monkeypatch.setattr(auth_util, "environment_credentials_uri", endpoint.uri)
    monkeypatch.setattr(auth_util, "environment_cli_profile_disabled", "true")
    monkeypatch.setattr(auth_util, "environment_credentials_file", os.devnull)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[CredentialServer]:
    with CredentialServer(vault=TokenVault(lifetime_s=3600)) as running:
        only_source(monkeypatch, running)
        yield running


@pytest.fixture
def service(endpoint: CredentialServer) -> Iterator[FeatureStoreServer]:
    """A server that knows the tokens of that endpoint and no others."""
    with FeatureStoreServer(accounts=endpoint) as running:
        make_view(running.store)
        yield running


def connect(service: FeatureStoreServer) -> FeatureStoreClient:
    return FeatureStoreClient(endpoint=service.endpoint, **LOGIN)


def open_view(client: FeatureStoreClient) -> Any:
    project = client.get_project(PROJECT)
    assert project is not None
    view = project.get_dynamic_embedding_feature_view(VIEW)
    assert view is not None
    return view


def issued(endpoint: CredentialServer) -> list[int]:
    """The number of the token in each answer of the endpoint."""
    return [entry.token for entry in endpoint.requests()]


def test_each_new_client_fetches_a_fresh_credential(endpoint: CredentialServer, service: FeatureStoreServer) -> None:
    first = connect(service)
    assert first.get_project(PROJECT) is not None
    connect(service)
    assert issued(endpoint) == [1, 1], "the endpoint was not asked by the second client, or not once"
    endpoint.rotate()
    assert connect(service).get_project(PROJECT) is not None
    assert issued(endpoint) == [1, 1, 2]
    assert first.get_project(PROJECT) is not None, "a rotation leaves the old token good"


def test_a_revoked_credential_is_cured_by_a_new_client(endpoint: CredentialServer, service: FeatureStoreServer) -> None:
    old = connect(service)
    view = open_view(old)
    endpoint.vault.revoke()
    with pytest.raises(TransportError) as caught:
        old.get_project(PROJECT)
    assert (caught.value.code, caught.value.applied) == ("InvalidSecurityToken.MismatchWithAccessKey", "no")
    assert open_view(connect(service)) is not None
    view.write_features_arrow(BATCH, VERSION, ts=5)
    assert view.write_flush()["errors"] == [], "the data plane has a token of its own"
    old.refresh()
    assert old.get_project(PROJECT) is not None
    assert issued(endpoint) == [1, 2, 2]


def test_an_expired_credential_is_retriable_and_cured_by_a_new_client(monkeypatch: pytest.MonkeyPatch) -> None:
    late_s = 0.0

    def clock() -> float:
        return time.time() + late_s

    vault = TokenVault(clock, lifetime_s=600)
    with CredentialServer(vault=vault) as endpoint, FeatureStoreServer(accounts=endpoint, clock=clock) as service:
        only_source(monkeypatch, endpoint)
        old = connect(service)
        assert old.get_project(PROJECT) is not None
        late_s = 700  # within the window of a signature's date
        with pytest.raises(TransportError) as caught:
            old.get_project(PROJECT)
        error = caught.value
        assert (error.code, error.applied, error.retriable) == ("InvalidSecurityToken.Expired", "no", True)
        assert connect(service).get_project(PROJECT) is not None
        old.refresh()
        assert old.get_project(PROJECT) is not None


def test_a_revoked_datasource_token_is_retriable_and_cured_by_a_new_client_or_a_refresh(backend: Backend) -> None:
    client = backend.client("rank0")
    view = open_view(client)
    view._batch_size = 1
    backend.add_fault(TokenRevokedFault(id="f"))
    for _ in range(2):  # it stays so
        view.write_features_arrow(BATCH, VERSION, ts=5)
        (error,) = view.write_flush()["errors"]
        assert (error.code, error.status, error.applied, error.retriable) == ("InvalidToken", 401, "no", True)
    with pytest.raises(TransportError, match="InvalidToken"):
        view.scan(VERSION)
    assert backend.store.log(PROJECT, VIEW).num_rows == 0
    fresh = open_view(backend.client("rank0"))
    fresh.write_features_arrow(BATCH, VERSION, ts=6)
    assert fresh.write_flush()["errors"] == []
    with pytest.raises(TransportError, match="InvalidToken"):
        view.scan(VERSION)
    client.refresh()
    assert view.scan(VERSION).column("ts").to_pylist() == [6]


def test_a_refresh_that_fails_changes_nothing(endpoint: CredentialServer, service: FeatureStoreServer) -> None:
    client = connect(service)
    view = open_view(client)
    endpoint.add_fault(Refusal(id="no", count=2))
    for _ in range(2):
        with pytest.raises(TransportError, match="NoCredential"):
            client.refresh()
    endpoint.rotate()
    service.add_fault(StatusFault(id="f", route="list_datasources"))
    with pytest.raises(TransportError, match="ServiceUnavailable"):
        client.refresh()
    assert client.get_project(PROJECT) is not None
    assert view.scan(VERSION).num_rows == 0
    client.refresh()
    assert client.get_project(PROJECT) is not None


def test_a_refresh_with_a_credential_that_the_service_refuses_keeps_the_old_one(endpoint: CredentialServer) -> None:
    class OnlyTheFirst:
        def secret_of(self, key: str) -> str | None:
            return endpoint.secret_of(key) if self.accepts(key, "", 0) else None

        def accepts(self, key: str, token: str, now: float) -> bool:
            return key == first

    first = endpoint.vault.issue().access_key_id
    with FeatureStoreServer(accounts=OnlyTheFirst()) as service:
        client = connect(service)
        endpoint.rotate()
        with pytest.raises(TransportError, match=r"InvalidAccessKeyId\.NotFound"):
            client.refresh()
        assert client.get_project(PROJECT) is not None


@pytest.mark.parametrize("what", ["no-expiration", "bad-expiration", "truncated", "not-json", "no-secret", "empty"])
def test_a_chain_without_a_credential_is_retriable_and_repeats_no_secret(
    endpoint: CredentialServer, service: FeatureStoreServer, what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.add_fault(Garbage(id="bad", what=what))
    with caplog.at_level(logging.DEBUG), pytest.raises(TransportError) as caught:
        connect(service)
    error = caught.value
    assert (error.code, error.status, error.applied, error.retriable) == ("NoCredential", None, "no", True)
    assert "ALIBABA_CLOUD_CREDENTIALS_URI" in str(error)
    said = [str(error), repr(error.__context__), repr(error.__cause__), caplog.text, *map(str, caplog.records)]
    for secret in endpoint.vault.secrets():
        assert not [text for text in said if secret in text]
    assert connect(service).get_project(PROJECT) is not None


def test_what_other_threads_log_meanwhile_is_kept(
    endpoint: CredentialServer, service: FeatureStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    logger, done = logging.getLogger("credentials"), threading.Event()
    said: list[int] = []

    def chatter() -> None:
        while not done.wait(0.0005):
            said.append(len(said))
            logger.warning("somebody else's %d", said[-1])

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        endpoint.add_fault(Refusal(id="no"))
        with pytest.raises(TransportError, match="NoCredential"):
            connect(service)
        connect(service)
    finally:
        done.set()
        thread.join(20)
    assert [record.args for record in caplog.records if "somebody else's" in record.msg] == [(n,) for n in said]
    assert len(said) > 20
    assert not logger.filters


@pytest.mark.parametrize(
    "arguments",
    [
        {"access_key_id": "x"},
        {"access_key_secret": "x"},
        {"security_token": "x"},
        {"access_key_id": "", "access_key_secret": ""},
        {"access_key_id": "x", "access_key_secret": "", "security_token": "x"},
    ],
)
def test_half_a_credential_is_refused_and_the_chain_not_asked(
    endpoint: CredentialServer, service: FeatureStoreServer, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="access_key_id and access_key_secret are needed"):
        FeatureStoreClient(endpoint=service.endpoint, **LOGIN, **arguments)
    assert endpoint.requests() == []


def test_given_credentials_are_used_and_the_chain_not_asked(
    endpoint: CredentialServer, service: FeatureStoreServer
) -> None:
    token = endpoint.vault.issue()
    client = FeatureStoreClient(
        token.access_key_id, token.access_key_secret, None, service.endpoint, token.security_token, **LOGIN
    )
    client.refresh()
    assert client.get_project(PROJECT) is not None
    endpoint.vault.revoke()
    with pytest.raises(TransportError, match="MismatchWithAccessKey"):
        client.refresh()
    assert endpoint.requests() == []
    assert not [text for text in (repr(vars(client._transport)), repr(vars(client))) if token.access_key_secret in text]


def test_writers_go_on_while_a_client_is_refreshed(connect: Callable[..., FeatureStoreClient]) -> None:
    client = connect()
    server_view_made = client.get_project(PROJECT)
    assert server_view_made is not None
    server_view_made.create_entity("entity", "id")
    view = server_view_made.create_dynamic_embedding_feature_view(VIEW, "entity")
    done = threading.Event()

    def refresh() -> None:
        while not done.is_set():
            client.refresh()

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        for ts in range(1, 50):
            view.write_features_arrow(BATCH, VERSION, ts=ts)
            assert view.write_flush()["errors"] == []
    finally:
        done.set()
        thread.join(20)
    assert not thread.is_alive()
    assert view.high_water_ts(VERSION) == 49

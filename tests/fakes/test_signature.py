"""Who may use the control plane: signatures, dates, nonces and tokens, with Alibaba's client and by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from alibabacloud_paifeaturestore20230621 import models
from alibabacloud_paifeaturestore20230621.client import Client
from alibabacloud_tea_openapi.exceptions import ClientException
from alibabacloud_tea_openapi.utils_models import Config

from deltaproof.fakes.credentials import TokenVault
from deltaproof.fakes.errors import ERRORS, FakeError, IncompleteSignature, MissingAuthorization, SignatureNonceUsed
from deltaproof.fakes.feature_store_py import FeatureStoreClient, TransportError
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.signature import NONCE_CHARS_MAX, WINDOW_S, PermanentAccounts, Verifier, sign

from .kit import Raw

NOW_S = 1_700_000_000.0
KEY, SECRET, TOKEN = "STS.key-of-the-tests", "secret-of-the-tests", "token-of-the-tests"


class Temporary:
    """One temporary credential, valid until ``ends_s``."""

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s

    def secret_of(self, access_key_id: str) -> str | None:
        return SECRET if access_key_id == KEY else None

    def accepts(self, access_key_id: str, security_token: str, now: float) -> bool:
        return (access_key_id, security_token) == (KEY, TOKEN) and now < self.ends_s


class Clock:
    """The server's clock for signatures: real time, and an offset that a test moves."""

    offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def strict(clock: Clock) -> Iterator[FeatureStoreServer]:
    """A server that knows one temporary credential, valid for an hour."""
    with FeatureStoreServer(accounts=Temporary(time.time() + 3600), clock=clock) as running:
        yield running


def openapi(server: FeatureStoreServer, key: str = KEY, secret: str = SECRET, token: str | None = TOKEN) -> Client:
    return Client(
        Config(
            access_key_id=key,
            access_key_secret=secret,
            security_token=token,
            region_id="cn-hangzhou",
            endpoint=server.endpoint,
            protocol="HTTP",
            read_timeout=20_000,
        )
    )


def refused(code: str, client: Client) -> str:
    with pytest.raises(ClientException) as caught:
        client.list_instances(models.ListInstancesRequest(status="Running"))
    assert (caught.value.code, caught.value.status_code) == (code, ERRORS[code].status)
    assert caught.value.request_id
    return str(caught.value)


def test_a_temporary_credential_is_accepted(strict: FeatureStoreServer) -> None:
    assert openapi(strict).list_instances(models.ListInstancesRequest()).body.total_count == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"key": "STS.other"}, "InvalidAccessKeyId.NotFound"),
        ({"secret": "other"}, "SignatureDoesNotMatch"),
        ({"token": "other"}, "InvalidSecurityToken.MismatchWithAccessKey"),
        ({"token": None}, "MissingSecurityToken"),
    ],
)
def test_wrong_credentials(strict: FeatureStoreServer, change: dict[str, Any], code: str) -> None:
    text = refused(code, openapi(strict, **change))
    assert not any(secret in text for secret in (SECRET, TOKEN, KEY))
    assert strict.requests()[-1].code == code


def test_an_expired_token(strict: FeatureStoreServer, clock: Clock) -> None:
    strict.state.verifier = Verifier(Temporary(time.time() - 1), clock=clock)
    refused("InvalidSecurityToken.Expired", openapi(strict))


def test_the_credential_endpoint_s_vault_judges(clock: Clock) -> None:
    vault = TokenVault(clock=clock)
    with FeatureStoreServer(accounts=vault, clock=clock) as server:
        token = vault.current()
        client = openapi(server, token.access_key_id, token.access_key_secret, token.security_token)
        assert client.list_instances(models.ListInstancesRequest()).body.total_count == 1
        vault.revoke(token.access_key_id)
        refused("InvalidSecurityToken.MismatchWithAccessKey", client)
        short = vault.issue(lifetime_s=1)
        client = openapi(server, short.access_key_id, short.access_key_secret, short.security_token)
        clock.offset_s = 2
        refused("InvalidSecurityToken.Expired", client)


# A minute on either side of 15: the date header has whole seconds, and a busy machine answers late.
@pytest.mark.parametrize(("offset_s", "accepted"), [(-960, False), (-840, True), (840, True), (960, False)])
def test_the_date_window(strict: FeatureStoreServer, clock: Clock, offset_s: float, accepted: bool) -> None:
    clock.offset_s = offset_s
    if accepted:
        assert openapi(strict).list_instances(models.ListInstancesRequest()).body.total_count == 1
    else:
        refused("InvalidTimeStamp.Expired", openapi(strict))


def test_the_facade_says_what_the_service_said(server: FeatureStoreServer) -> None:
    with pytest.raises(TransportError) as caught:
        FeatureStoreClient("deltaproof", "wrong", "local", server.endpoint, None, "rank0", "password")
    assert (caught.value.code, caught.value.status, caught.value.retriable) == ("SignatureDoesNotMatch", 400, False)


def test_a_permanent_key_wants_no_token(server: FeatureStoreServer) -> None:
    refused("InvalidSecurityToken.MismatchWithAccessKey", openapi(server, "deltaproof", "deltaproof", "some token"))


def test_a_replayed_request_over_http(raw: Raw) -> None:
    headers = raw.signed("GET", "/api/v1/instances")
    assert [raw("GET", "/api/v1/instances", headers=headers).status for _ in range(2)] == [200, 400]
    assert b"SignatureNonceUsed" in raw("GET", "/api/v1/instances", headers=headers).data


@pytest.mark.parametrize(
    ("path", "signed_path", "body", "signed_body"),
    [
        ("?Status=Running", "", None, None),
        ("?Status=Running&PageSize=2", "?Status=Running&PageSize=1", None, None),
        ("/featurestore-cn-deltaproof/projects", "", None, None),
        ("/featurestore-cn-deltaproof/projects", "/featurestore-cn-deltaproof/projects", b'{"Name": "a"}', b"{}"),
        ("/featurestore-cn-deltaproof/projects", "/featurestore-cn-deltaproof/projects", b'{"Name": "a"}', None),
    ],
)
def test_a_request_changed_on_the_way(
    server: FeatureStoreServer, raw: Raw, path: str, signed_path: str, body: Any, signed_body: Any
) -> None:
    method, root = "POST" if body else "GET", "/api/v1/instances"
    reply = raw(method, root + path, body=body, headers=raw.signed(method, root + signed_path, signed_body))
    assert (reply.status, b"SignatureDoesNotMatch" in reply.data) == (400, True)
    assert server.store.projects() == ["deltaproof"]


@pytest.mark.parametrize("query", ["b=1&a=2", "a=%20x&b=a+b", "a=%2B%2F%3D~", "a=&a=1&b", "Order=%C3%A9"])
def test_queries_in_canonical_order(raw: Raw, query: str) -> None:
    target = "/api/v1/instances?" + query
    assert b"SignatureDoesNotMatch" not in raw("GET", target, headers=raw.signed("GET", target)).data


# By hand, on the clock


def request(at_s: float, nonce: str = "n", **changes: str) -> tuple[str, str, dict[str, str]]:
    headers = {
        "host": "h",
        "x-acs-action": "ListInstances",
        "x-acs-version": "2023-06-21",
        "x-acs-content-sha256": "0" * 64,
        "x-acs-date": datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "x-acs-signature-nonce": nonce,
        **changes,
    }
    names = ";".join(sorted(headers))
    signature = sign("GET", "/p", headers, names, "deltaproof")
    headers["Authorization"] = f"ACS3-HMAC-SHA256 Credential=deltaproof,SignedHeaders={names},Signature={signature}"
    return "GET", "/p", headers


def code_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except FakeError as error:
        return error.code
    return ""


def test_a_known_answer() -> None:
    # Calculated with hashlib alone from the canonical request written out below.
    import hashlib
    import hmac

    headers = {"host": "example", "x-acs-date": "2026-01-01T00:00:00Z", "x-acs-content-sha256": "e3"}
    canonical = (
        "GET\n/a%20b\na=1&b=x%20y\nhost:example\nx-acs-content-sha256:e3\nx-acs-date:2026-01-01T00:00:00Z\n"
        "\nhost;x-acs-content-sha256;x-acs-date\ne3"
    )
    text = "ACS3-HMAC-SHA256\n" + hashlib.sha256(canonical.encode()).hexdigest()
    want = hmac.new(b"secret", text.encode(), hashlib.sha256).hexdigest()
    got = sign("GET", "/a%20b?b=x+y&a=1", headers, "host;x-acs-content-sha256;x-acs-date", "secret")
    assert got == want


def test_a_nonce_is_free_again_only_when_its_date_has_expired() -> None:
    now = [NOW_S]
    verifier = Verifier(clock=lambda: now[0])
    early = request(NOW_S + WINDOW_S)  # dated by a clock that is ahead: valid for the longest
    verifier.check(*early)
    codes = []
    for later_s in (0, WINDOW_S, 2 * WINDOW_S, 2 * WINDOW_S + 1):
        now[0] = NOW_S + later_s
        codes.append(code_of(lambda: verifier.check(*early)))
    assert codes == ["SignatureNonceUsed"] * 3 + ["InvalidTimeStamp.Expired"]
    assert verifier.check(*request(now[0])) == "deltaproof"


def test_the_nonce_memory_is_bounded() -> None:
    verifier = Verifier(clock=lambda: NOW_S, nonces_max=10)
    for number in range(100):
        verifier.check(*request(NOW_S, str(number)))
    assert len(verifier._nonces) == 10
    with pytest.raises(SignatureNonceUsed):
        verifier.check(*request(NOW_S, "99"))
    for nonce in ("", "x" * (NONCE_CHARS_MAX + 1)):
        with pytest.raises(IncompleteSignature):
            verifier.check(*request(NOW_S, nonce))


def test_refused_requests_use_up_no_nonce() -> None:
    verifier = Verifier(PermanentAccounts({"deltaproof": "other"}), clock=lambda: NOW_S)
    assert code_of(lambda: verifier.check(*request(NOW_S))) == "SignatureDoesNotMatch"
    assert not verifier._nonces


@pytest.mark.parametrize("name", ["host", "x-acs-date", "x-acs-signature-nonce", "x-acs-content-sha256"])
def test_what_must_be_signed(name: str) -> None:
    verifier = Verifier(clock=lambda: NOW_S)
    method, target, headers = request(NOW_S)
    del headers[name]
    assert code_of(lambda: verifier.check(method, target, headers)) == "IncompleteSignature"
    method, target, headers = request(NOW_S)
    headers["x-acs-security-token"] = "added on the way"
    assert code_of(lambda: verifier.check(method, target, headers)) == "IncompleteSignature"


@pytest.mark.parametrize("date", ["", "yesterday", "2026-13-01T00:00:00Z", "Thu, 01 Jan 2026 00:00:00 GMT"])
def test_malformed_dates(date: str) -> None:
    verifier = Verifier(clock=lambda: NOW_S)
    assert code_of(lambda: verifier.check(*request(NOW_S, **{"x-acs-date": date}))) == "InvalidTimeStamp.Format"


def test_other_schemes_are_no_signature() -> None:
    with pytest.raises(MissingAuthorization):
        Verifier().check("GET", "/", {"Authorization": "Bearer x"})

"""The credential endpoint and its vault, by themselves and under the published client's default chain."""

from __future__ import annotations

import calendar
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from alibabacloud_credentials.provider.uri import URLCredentialsProvider

from deltaproof.fakes.credentials import (
    STALE_S,
    CredentialServer,
    Expired,
    Garbage,
    Refusal,
    Reset,
    Slow,
    TokenVault,
)
from deltaproof.fakes.errors import InvalidParameter

DEADLINE_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[CredentialServer]:
    with CredentialServer() as running:
        yield running


def ask(endpoint: CredentialServer, method: str = "GET", path: str | None = None) -> urllib3.BaseHTTPResponse:
    url = endpoint.uri if path is None else f"http://127.0.0.1:{endpoint.port}{path}"
    with urllib3.PoolManager(retries=False, timeout=10) as http:
        return http.request(method, url)


class Clock:
    def __init__(self, now: float = 1_700_000_000.5) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# The vault


def test_a_token_is_good_until_it_expires_and_not_at_that_moment() -> None:
    clock = Clock()
    vault = TokenVault(clock, lifetime_s=100)
    token = vault.issue()
    assert vault.accepts(token.access_key_id, token.security_token)
    assert vault.accepts(token.access_key_id, token.security_token, now=clock.now + 99.9)
    assert vault.verdict(token.access_key_id, token.security_token, now=clock.now + 100) == "expired"
    clock.now += 101
    assert not vault.accepts(token.access_key_id, token.security_token)
    assert vault.secret_of(token.access_key_id) == token.access_key_secret


def test_wrong_unknown_and_revoked_credentials_are_told_apart() -> None:
    vault = TokenVault(Clock())
    first, second = vault.issue(), vault.issue()
    assert vault.verdict("STS.nobody", first.security_token) == "unknown-key"
    assert vault.secret_of("STS.nobody") is None
    for wrong in ("", second.security_token, first.security_token[:-1], "\udcff", "ключ"):
        assert vault.verdict(first.access_key_id, wrong) == "wrong-token"
    vault.revoke(first.access_key_id)
    vault.revoke("STS.nobody")
    assert vault.verdict(first.access_key_id, first.security_token) == "revoked"
    assert vault.accepts(second.access_key_id, second.security_token)
    vault.revoke()
    assert not vault.accepts(second.access_key_id, second.security_token)
    assert vault.current().number == 3, "a revoked token was handed out"


def test_rotation_issues_a_new_token_and_leaves_the_old_one_good() -> None:
    vault = TokenVault(Clock())
    before = vault.current()
    assert vault.current() is before
    vault.rotate()
    after = vault.current()
    assert after.access_key_id != before.access_key_id
    assert vault.accepts(before.access_key_id, before.security_token)
    assert vault.accepts(after.access_key_id, after.security_token)


def test_a_token_is_renewed_before_the_client_would_count_it_as_stale() -> None:
    clock = Clock()
    vault = TokenVault(clock, lifetime_s=3600)
    first = vault.current()
    clock.now += 3600 - STALE_S - 299
    second = vault.current()
    assert second.number == 2
    assert second.expires_s == clock.now + 3600
    assert vault.accepts(first.access_key_id, first.security_token)


def test_a_seed_makes_tokens_repeatable_and_without_one_they_differ() -> None:
    drawn = {TokenVault(Clock(), seed=seed).issue().access_key_secret for seed in (1, 1, 2, None, None)}
    assert len(drawn) == 4


def test_a_token_has_the_shape_of_the_real_one() -> None:
    token = TokenVault(Clock()).issue()
    answer = token.answer()
    assert list(answer) == ["Code", "AccessKeyId", "AccessKeySecret", "SecurityToken", "Expiration"]
    assert token.access_key_id.startswith("STS.")
    assert (len(token.access_key_secret), len(token.security_token)) == (44, 384)
    stated = calendar.timegm(time.strptime(answer["Expiration"], "%Y-%m-%dT%H:%M:%SZ"))
    assert token.expires_s - 1 < stated <= token.expires_s


# The endpoint


def test_each_fault_fires_exactly_its_count(endpoint: CredentialServer) -> None:
    endpoint.add_fault(Slow(id="slow", skip=1, count=2, delay_ms=1))
    endpoint.add_fault(Refusal(id="refused", count=2))
    endpoint.add_fault(Refusal(id="not success", status=200, code="Failed"))
    endpoint.add_fault(Garbage(id="garbage", skip=2))
    endpoint.add_fault(Expired(id="expired"))
    endpoint.add_fault(Reset(id="reset"))
    for _ in range(5):
        ask(endpoint)
    with pytest.raises(urllib3.exceptions.ProtocolError):
        ask(endpoint)
    assert ask(endpoint).status == 200
    assert endpoint.fired() == {"slow": 2, "refused": 2, "not success": 1, "garbage": 1, "expired": 1, "reset": 1}
    log = endpoint.requests()
    assert [entry.fault for entry in log] == [
        "refused", "refused", "not success", "garbage", "expired", "reset", None
    ]  # fmt: skip
    assert [entry.status for entry in log] == [403, 403, 200, 200, 200, 0, 200]
    assert [entry.seq for entry in log] == [1, 2, 3, 4, 5, 6, 7]
    assert all(before.t_ms <= after.t_ms for before, after in itertools.pairwise(log))


def test_slow_answers_are_slow(endpoint: CredentialServer) -> None:
    endpoint.add_fault(Slow(id="slow", delay_ms=300))
    started = time.monotonic()
    assert ask(endpoint).json()["Code"] == "Success"
    assert time.monotonic() - started >= 0.3


def test_stopping_does_not_wait_for_a_slow_answer() -> None:
    with CredentialServer() as running:
        running.add_fault(Slow(id="slow", delay_ms=60_000))
        with urllib3.PoolManager(retries=False, timeout=0.2) as http, pytest.raises(urllib3.exceptions.HTTPError):
            http.request("GET", running.uri)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    running.stop()


def test_only_get_of_the_path_is_answered(endpoint: CredentialServer) -> None:
    assert ask(endpoint, "POST").status == 405
    assert ask(endpoint, "HEAD").status == 405
    assert ask(endpoint, path="/../credentials/x").status == 404
    assert endpoint.requests() == []


def test_impossible_faults_are_refused(endpoint: CredentialServer) -> None:
    for fault in (
        Refusal(id=""),
        Refusal(id="a", count=0),
        Refusal(id="a", status=302),
        Refusal(id="a", code="Success"),
        Slow(id="a", delay_ms=-1),
        Expired(id="a", age_s=float("nan")),
    ):
        with pytest.raises(InvalidParameter):
            endpoint.add_fault(fault)
    endpoint.add_fault(Reset(id="a"))
    with pytest.raises(InvalidParameter, match="two faults"):
        endpoint.add_fault(Reset(id="a"))


def test_no_secret_stands_in_a_repr_or_in_the_log(endpoint: CredentialServer) -> None:
    endpoint.add_fault(Garbage(id="garbage", what="no-expiration"))
    endpoint.add_fault(Refusal(id="refused"))
    answers = [ask(endpoint).data.decode() for _ in range(3)]
    token = endpoint.vault.current()
    shown = [repr(endpoint), repr(endpoint.vault), repr(token), str(endpoint.requests()), str(endpoint.faults())]
    shown.append(answers[1])
    for secret in endpoint.vault.secrets():
        assert not [text for text in shown if secret in text]
        assert secret in answers[2]


# The published client


def test_the_client_keeps_a_fresh_token_and_asks_again_for_a_stale_one() -> None:
    with CredentialServer(vault=TokenVault(lifetime_s=3600)) as endpoint:
        provider = URLCredentialsProvider(uri=endpoint.uri)
        got = provider.get_credentials()
        assert endpoint.accepts(got.get_access_key_id(), got.get_security_token())
        assert endpoint.secret_of(got.get_access_key_id()) == got.get_access_key_secret()
        endpoint.rotate()
        assert provider.get_credentials().get_access_key_id() == got.get_access_key_id()
        assert len(endpoint.requests()) == 1
    # Good for 899 s, which the client counts as stale: it is used, and asked for again at each use.
    with CredentialServer(vault=TokenVault(lifetime_s=STALE_S - 1)) as endpoint:
        provider = URLCredentialsProvider(uri=endpoint.uri)
        keys = {provider.get_credentials().get_access_key_id() for _ in range(3)}
        assert len(keys) == len(endpoint.requests()) == 3


@pytest.mark.parametrize(
    "fault",
    [
        Refusal(id="refused"),
        Refusal(id="not success", status=200),
        *(Garbage(id=what, what=what) for what in (
            "not-json", "empty", "not-utf8", "truncated", "no-secret", "no-expiration", "bad-expiration"
        )),
        Expired(id="expired"),
        Reset(id="reset"),
    ],
    ids=lambda fault: fault.id.replace(" ", "-"),
)  # fmt: skip
def test_the_client_raises_without_a_token_and_recovers(endpoint: CredentialServer, fault: Any) -> None:
    endpoint.add_fault(fault)
    provider = URLCredentialsProvider(uri=endpoint.uri)
    with pytest.raises(Exception):  # noqa: B017, PT011  # the client raises what it met: json, unicode, requests, its own
        provider.get_credentials()
    assert endpoint.fired() == {fault.id: 1}
    got = provider.get_credentials()
    assert endpoint.accepts(got.get_access_key_id(), got.get_security_token())


def test_the_client_quotes_the_secret_of_an_answer_without_expiration(endpoint: CredentialServer) -> None:
    """Why a publisher must not print this exception."""
    endpoint.add_fault(Garbage(id="garbage", what="no-expiration"))
    with pytest.raises(Exception, match="error retrieving credentials") as caught:
        URLCredentialsProvider(uri=endpoint.uri).get_credentials()
    assert any(secret in str(caught.value) for secret in endpoint.vault.secrets())


# Runs where the variable is set before the import. One line per line of stdin.
CHAIN = """
import json, sys
from alibabacloud_credentials.client import Client
client = None
for line in sys.stdin:
    if line.strip() == "new" or client is None:
        client = Client()
    try:
        got = client.get_credential()
        answer = {"key": got.access_key_id, "token": got.security_token, "provider": got.provider_name,
                  "secret": got.access_key_secret}
    except Exception as error:
        answer = {"error": type(error).__name__}
    print(json.dumps(answer), flush=True)
"""


class Chain:
    """A process with the published client's default chain, asked over its stdin."""

    def __init__(self, endpoint: CredentialServer, home: Path) -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **endpoint.environment()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment, cwd=home,
        )  # fmt: skip

    def __call__(self, word: str = "get") -> dict[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        answer: dict[str, str] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def chain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[CredentialServer, Chain]]:
    lifetime_s = getattr(request, "param", 3600.0)
    with CredentialServer(vault=TokenVault(lifetime_s=lifetime_s)) as endpoint:
        started = Chain(endpoint, tmp_path)
        try:
            yield endpoint, started
        finally:
            started.process.kill()
            started.process.communicate(timeout=DEADLINE_S)


def test_the_default_chain_finds_the_endpoint_and_each_new_client_asks_it(
    chain: tuple[CredentialServer, Chain],
) -> None:
    endpoint, get = chain
    first = get()
    assert first["provider"] == "default/credential_uri"
    assert endpoint.accepts(first["key"], first["token"])
    assert endpoint.secret_of(first["key"]) == first["secret"]
    endpoint.rotate()
    assert get() == first, "the client did not keep a token that is not stale"
    assert get("new")["key"] != first["key"]
    endpoint.add_fault(Refusal(id="refused"))
    assert get("new") == {"error": "CredentialException"}
    assert endpoint.fired() == {"refused": 1}
    again = get()
    assert endpoint.accepts(again["key"], again["token"])


@pytest.mark.parametrize("chain", [STALE_S - 60.0], indirect=True)
def test_the_default_chain_fails_when_a_stale_token_cannot_be_renewed(chain: tuple[CredentialServer, Chain]) -> None:
    endpoint, get = chain
    first = get()
    endpoint.add_fault(Refusal(id="refused", count=2))
    assert get() == {"error": "CredentialException"}
    assert get() == {"error": "CredentialException"}
    assert endpoint.accepts(first["key"], first["token"]), "the token was good all along; the client did not use it"
    assert get()["key"] != first["key"]

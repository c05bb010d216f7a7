import base64
import json
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.fakes.errors import ERRORS
from deltaproof.fakes.feature_store_py.transport import TransportError
from deltaproof.reference import errors
from deltaproof.reference.errors import PublisherError, is_expired, is_retriable, redact, remember, retry_after_s


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_remembered", type(errors._remembered)(maxlen=errors._remembered.maxlen))


class Said(Exception):
    def __init__(self, text: str = "", **said: Any) -> None:
        super().__init__(text)
        self.__dict__.update(said)


@pytest.mark.parametrize(
    ("error", "retriable"),
    [
        (Said(retriable=True, status=403), True),
        (Said(retriable=False, status=503), False),
        (Said(status=500), True),
        (Said(status=499), False),
        (Said(status_code=502), True),
        (Said(statusCode=404), False),
        (Said(status=429), True),
        (Said(status=408), True),
        (Said(status=403), False),
        (Said(status=401), False),
        (Said(status="odd"), True),
        ("HTTP 503 from the store", True),
        ("HTTP 403 from the store", False),
        ("403 rows: the connection was lost", True),
        ("no answer after 400 ms", True),
        ("lost 12345 bytes", True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError("no space left"), True),
        (RuntimeError("?"), True),
        (PermissionError(), False),
        (pa.ArrowInvalid("schema"), False),
        (TypeError(), False),
        (KeyError("pk"), False),
        (ZeroDivisionError(), False),
        (PublisherError("no view"), False),
        (PublisherError("no credential yet", retriable=True), True),
    ],
)
def test_errors_are_told_apart(error: object, retriable: bool) -> None:
    assert is_retriable(error) is retriable


@pytest.mark.parametrize(
    ("error", "expired"),
    [
        (Said(status=401), True),
        (Said("x", status=400, code="InvalidSecurityToken.Expired"), True),
        (Said("InvalidSecurityToken.Expired: fetch another"), True),
        ("InvalidToken: the datasource token does not match", True),
        ("HTTP 401", True),
        ("the security token has expired", True),
        (Said("the token expired", status=403), False),
        ("HTTP 403: InvalidToken", False),
        (Said("InvalidTimeStamp.Expired: set the clock", status=400), False),
        (Said("the tokenizer expired nothing", status=400), False),
        (ConnectionResetError("reset"), False),
    ],
)
def test_an_expired_token_is_known_by_status_code_or_text(error: object, expired: bool) -> None:
    assert is_expired(error) is expired


def test_the_fakes_table_and_this_module_agree() -> None:
    """Every error of the fake store: what it calls retriable is retried, and only token errors ask for a fresh one."""
    for code, spec in ERRORS.items():
        error = TransportError(code, "said by the fake")
        assert is_retriable(error) is spec.retriable
        assert is_expired(error) is (code in ("InvalidToken", "MissingAuthorization", "InvalidSecurityToken.Expired"))


def test_the_stores_wish_to_be_left_alone_is_never_negative() -> None:
    assert [retry_after_s(Said(retry_after_s=wait_s)) for wait_s in (None, -1, 2, "3")] == [None, 0.0, 2.0, 3.0]
    assert retry_after_s(Said(retry_after_s="Wed, 21 Oct 2026 07:28:00 GMT")) is None
    assert retry_after_s("text") is None


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("the token expired", "the token expired"),
        ("InvalidToken: read it again", "InvalidToken: read it again"),
        ("Authorization: Bearer abc123, next", "Authorization: [redacted], next"),
        ("Auth: dXNlcjpwYXNz", "Auth: [redacted]"),
        ('{"security_token": "abc"}', '{"security_token": "[redacted]'),
        (r"'{\"SecurityToken\": \"abc\"}'", r"'{\"SecurityToken\": \"[redacted]"),
        ('"AccessKeyId": "STS.x", "n": 1', '"AccessKeyId": "[redacted], "n": 1'),
        ("Signature=0a1b; x=1", "Signature=[redacted]; x=1"),
        ("an authority: none", "an authority: none"),
        ("key 5, step 7", "key 5, step 7"),
        ("GET https://user:pass@host/x", "GET https://[redacted]host/x"),
        ("GET http://host/x?sign=1&b=2 failed", "GET http://host/x?[redacted] failed"),
        ("GET http://host/x failed?", "GET http://host/x failed?"),
    ],
)
def test_what_a_telling_label_or_place_names_is_redacted(text: str, left: str) -> None:
    assert redact(text) == left


def test_texts_stay_short_and_short_secrets_do_not_tear_words_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATUREDB_PASSWORD", "any")
    assert redact("many companies") == "many companies"
    assert len(redact("y" * 999)) == 301
    assert len(redact("y" * 999, 500)) == 501
    assert redact(TimeoutError()) == "TimeoutError"


def test_the_last_tokens_are_remembered_not_all() -> None:
    for number in range(200):
        remember(f"token-number-{number:04d}", None, "")
        remember(f"token-number-{number:04d}")
    assert redact("a token-number-0199 b token-number-0150 c") == "a [redacted] b [redacted] c"
    assert len(errors._remembered) == 64


def test_a_secret_that_holds_another_is_redacted_whole() -> None:
    remember("abcd", "abcd-efg-1")
    assert redact("x abcd-efg-1 abcd") == "x [redacted] [redacted]"


def test_no_letter_of_a_short_secret_is_left_where_json_wrote_it() -> None:
    remember('pw"d')
    assert redact(json.dumps({"x": 'pw"d'})) == '{"x": "[redacted]"}'


@pytest.mark.parametrize(("secret", "left"), [("company-secret1", "company-wide"), ("company-secret12", "[redacted]")])
def test_only_a_long_secret_is_known_by_its_beginning(secret: str, left: str) -> None:
    remember(secret)
    assert redact(f"{secret} company-wide") == f"[redacted] {left}"


SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=16, max_size=60)


@given(
    SECRETS,
    st.sampled_from(errors.SECRET_VARIABLES) | st.none(),
    st.sampled_from(["plain", "quoted", "json", "repr", "base64", "cut", "cut-base64", "exception", "nested"]),
    st.sampled_from(["", "x ", "login '", "at step 3: "]),
    st.sampled_from(["", " y", "' failed", ", again"]),
)
def test_a_known_secret_never_survives_however_it_was_written(
    secret: str, variable: str | None, form: str, before: str, after: str
) -> None:
    encoded = base64.b64encode(secret.encode()).decode()
    written = {
        "plain": secret,
        "quoted": quote(secret, safe=""),
        "json": json.dumps({"x": secret}),
        "repr": repr([secret]),
        "base64": encoded,
        "cut": secret[: len(secret) - 3],
        "cut-base64": encoded[: len(encoded) - 5],
        "exception": str(KeyError(secret)),
        "nested": json.dumps(json.dumps(secret)),
    }[form]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "_remembered", type(errors._remembered)(maxlen=64))
        patch.setenv(variable, secret) if variable else remember(secret)
        shown = redact(f"{before}{written}{after}")
    for whole in (secret, quote(secret, safe=""), encoded, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
        assert whole not in shown
        assert whole[:12] not in shown
    assert shown.startswith(before)

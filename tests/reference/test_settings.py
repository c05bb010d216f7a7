import ipaddress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.reference.settings import Settings

GOOD: dict[str, Any] = {"project": "p", "view": "v", "version": "v1", "every_steps": 5}


def test_settings_survive_json() -> None:
    settings = Settings(**GOOD)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": ""}, "setting version is ''"),
        ({"version": "  "}, "setting version"),
        ({"version": "Default"}, "serving reads 'default'"),
        ({"project": " "}, "setting project is empty"),
        ({"view": ""}, "setting view is empty"),
        ({"every_steps": None}, "exactly one"),
        ({"every_minutes": 1.0}, "exactly one"),
        ({"every_steps": 0}, "setting every_steps is 0, expected 1 to 2147483647"),
        ({"every_steps": None, "every_minutes": 0.0}, "setting every_minutes is 0.0"),
        ({"every_steps": None, "every_minutes": float("nan")}, "setting every_minutes is nan"),
        ({"flush_timeout_s": float("inf")}, "setting flush_timeout_s"),
        ({"progress_s": 0.0}, "setting progress_s"),
        ({"close_timeout_s": -1.0}, "setting close_timeout_s"),
        ({"batch_size": 0}, "setting batch_size"),
        ({"max_workers": 0}, "setting max_workers"),
        ({"queue_steps_max": 0}, "setting queue_steps_max"),
        ({"queue_bytes_max": 0}, "setting queue_bytes_max"),
        ({"retry_attempts_max": 0}, "setting retry_attempts_max"),
        (
            {"retry_delay_ms_min": 500, "retry_delay_ms_max": 499},
            "setting retry_delay_ms_max is 499, expected 500 to 2147483648000",
        ),
        ({"ttl_s": 0}, "setting ttl_s"),
        ({"shard_count": 21}, "expected 1 to 20"),
        ({"replication_count": 4}, "expected 1 to 3"),
        ({"settle_s": -0.1}, "setting settle_s is -0.1"),
        ({"settle_s": float("nan")}, "setting settle_s is nan"),
        ({"settle_s": 1e10}, "setting settle_s is 10000000000.0, expected 0 to 2147483648"),  # time.sleep overflows
        ({"retry_delay_ms_max": 10**13}, "expected 100 to 2147483648000"),
        ({"max_workers": 10**30}, "setting max_workers"),
        ({"every_steps": "5"}, "setting every_steps: Expected `int | null`, got `str`; docs/publisher.md"),
        ({"project": None}, "setting project: Expected `str`, got `null`"),
        ({"naming": "Role"}, "setting naming: Invalid enum value 'Role'"),
        ({"upload_format": "Arrow"}, "setting upload_format"),
        ({"retain": Path("kept")}, "setting retain: Expected `str | null`"),
        ({"retain": ""}, "setting retain is empty"),
        ({"spill": "s3://[x"}, "setting spill is no URI"),
    ],
)
def test_a_wrong_setting_is_named_when_the_settings_are_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**(GOOD | change))


def test_unknown_settings_in_json_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="every_step"):
        msgspec.json.decode(b'{"project":"p","view":"v","version":"v1","every_step":5}', type=Settings)


@pytest.mark.parametrize(
    "endpoint",
    [
        None,
        "127.0.0.1:8080",
        "paifeaturestore.cn-hangzhou.aliyuncs.com",
        "https://paifeaturestore.cn-hangzhou.aliyuncs.com",
        "HTTPS://host:443/",
        "http://127.0.0.1:8080",
        "http://127.8.9.1",
        "http://localhost:1",
        "http://[::1]:8080",
        "[2001:db8::1]:443",
    ],
)
def test_an_endpoint_over_https_or_on_this_machine_is_accepted(endpoint: str | None) -> None:
    assert Settings(**GOOD, endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://paifeaturestore.cn-hangzhou.aliyuncs.com",
        "HTTP://10.0.0.7:80",
        "http://127.0.0.1.evil.example",
        "http://localhost.evil.example",
        "http://0.0.0.0:80",
        "http://[2001:db8::1]:80",
        "http://[::ffff:10.0.0.7]",
        "ftp://host",
    ],
)
def test_credentials_never_travel_in_clear_text_to_another_machine(endpoint: str) -> None:
    with pytest.raises(ValueError, match="would get the credentials in clear text, use https://"):
        Settings(**GOOD, endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        " ",
        "https://",
        "//host",
        "https:/host",
        "https://host/path-hunter2",
        "https://user:hunter2@host",
        "http://user:hunter2@127.0.0.1",
        "http://127.0.0.1\\@evil.example",
        "http://127.0.0.1\n.evil.example",
        "http://127.0.0.1#@evil.example/hunter2",
        "https://host?token=hunter2",
        "host:port",
        "::1",
        "http://\uff4cocalhost:1",
    ],
)
def test_what_is_no_host_is_refused_and_not_repeated(endpoint: str) -> None:
    with pytest.raises(ValueError, match="setting endpoint is not host, host:port or https://host:port") as caught:
        Settings(**GOOD, endpoint=endpoint)
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=30))
def test_http_to_anything_but_loopback_is_always_refused(text: str) -> None:
    """Whatever parses the URL later (here urllib3, which the SDKs use) must not find another host behind it."""
    try:
        endpoint = Settings(**GOOD, endpoint=f"http://{text}").endpoint
    except ValueError:
        return
    host = urllib3.util.parse_url(str(endpoint)).host
    assert host is not None
    assert host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback


def test_settings_changed_later_are_checked_again() -> None:
    with pytest.raises(ValueError, match="clear text"):
        msgspec.structs.replace(Settings(**GOOD), endpoint="http://10.0.0.7")
    with pytest.raises(msgspec.ValidationError, match="clear text"):
        msgspec.convert({**GOOD, "endpoint": "http://10.0.0.7"}, Settings)


@pytest.mark.parametrize("name", ["retain", "spill"])
def test_a_place_for_shards_takes_no_login(name: str) -> None:
    assert getattr(Settings(**(GOOD | {name: "s3://bucket/a@b"})), name) == "s3://bucket/a@b"
    for place in ("s3://AKIA:hunter2@bucket/prefix", "s3://bucket/prefix?secret_key=hunter2"):
        with pytest.raises(ValueError, match=f"setting {name} holds a login") as caught:
            Settings(**(GOOD | {name: place}))
        assert "hunter2" not in str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "publisher.toml"


def test_a_toml_file_gives_the_settings_it_names(file: Path) -> None:
    file.write_text('project = "p"\nview = "v"\nversion = "v1"\nevery_minutes = 5\nnaming = "role"\nsettle_s = 0.5\n')
    expected = Settings(project="p", view="v", version="v1", every_minutes=5.0, naming="role", settle_s=0.5)
    assert Settings.load(file) == Settings.load(str(file)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('project = "p\nview = "v"', r"is not TOML: .*line 1"),
        (b"\xff", "is not TOML"),
        ("every_step = 1", r"key 'every_step' is unknown; did you mean 'every_steps'\?"),
        ("zzz = 1", "key 'zzz' is unknown; docs/publisher.md lists the keys"),
        ("[publisher]\nproject = 'p'", "key 'publisher' is unknown"),
        ("every_steps = '5'", "key 'every_steps': Expected `int | null`, got `str`; docs/publisher.md"),
        ("naming = 'table'", "key 'naming': Invalid enum value 'table'"),
        ("every_steps = 5", "Object missing required field `project`"),
        ("project = 'p'\nview = 'v'\nversion = 'default'\nevery_steps = 5", "setting version is 'default'"),
        ("project = 'p'\nview = 'v'\nversion = 'v1'", "set exactly one of every_steps and every_minutes"),
    ],
)
def test_a_bad_file_says_where_and_what_to_do(file: Path, text: str | bytes, said: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said) as caught:
        Settings.load(file)
    assert str(caught.value).startswith(str(file))


def test_a_missing_file_says_so(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"publisher.toml cannot be read \(No such file or directory\); name a TOML file"
    ):
        Settings.load(file)


@pytest.mark.parametrize(
    "key", ["access_key_secret", "featuredb_password", "security_token", "AccessKeyId", "username"]
)
def test_a_credential_in_a_file_is_refused_and_not_repeated(file: Path, key: str) -> None:
    file.write_text(f'project = "p"\n{key} = "hunter2"\n')
    with pytest.raises(
        ValueError, match=f"key '{key}' looks like a credential.*set the environment variables"
    ) as caught:
        Settings.load(file)
    assert "hunter2" not in str(caught.value)

from typing import Any

import msgspec
import pytest

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
        ({"every_steps": 0}, "setting every_steps is 0, the least is 1"),
        ({"every_steps": None, "every_minutes": 0.0}, "setting every_minutes is 0.0"),
        ({"every_steps": None, "every_minutes": float("nan")}, "setting every_minutes is nan"),
        ({"flush_timeout_s": float("inf")}, "setting flush_timeout_s"),
        ({"close_timeout_s": -1.0}, "setting close_timeout_s"),
        ({"batch_size": 0}, "setting batch_size"),
        ({"max_workers": 0}, "setting max_workers"),
        ({"queue_steps_max": 0}, "setting queue_steps_max"),
        ({"queue_bytes_max": 0}, "setting queue_bytes_max"),
        ({"retry_attempts_max": 0}, "setting retry_attempts_max"),
        ({"retry_delay_ms_min": 500, "retry_delay_ms_max": 499}, "setting retry_delay_ms_max is 499, the least is 500"),
        ({"ttl_s": 0}, "setting ttl_s"),
        ({"shard_count": 21}, "expected 1 to 20"),
        ({"replication_count": 4}, "expected 1 to 3"),
    ],
)
def test_a_wrong_setting_is_named_when_the_settings_are_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**(GOOD | change))


def test_unknown_settings_in_json_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="every_step"):
        msgspec.json.decode(b'{"project":"p","view":"v","version":"v1","every_step":5}', type=Settings)

"""Everything a publisher can be told, checked when it is built: a wrong setting must fail before the first step."""

from __future__ import annotations

import difflib
import functools
import ipaddress
import re
from os import PathLike
from pathlib import Path
from typing import Literal, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from .contract import EmbeddingType, Naming

COUNTS = ("every_steps", "batch_size", "max_workers", "queue_steps_max", "retry_attempts_max", "ttl_s")
DURATIONS = ("every_minutes", "flush_timeout_s", "close_timeout_s", "progress_s")
SECRET = re.compile(r"(?i)secret|password|token|credential|access_?key|username")
SECONDS_MAX = 2**31  # 68 years; what waits cannot count beyond 292
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(COUNTS, (1, 2**31 - 1)),
    **dict.fromkeys(DURATIONS, (1e-9, SECONDS_MAX)),
    "queue_bytes_max": (1, 2**63 - 1),
    "settle_s": (0, SECONDS_MAX),
    "retry_delay_ms_min": (0, 1000 * SECONDS_MAX),
    "shard_count": (1, 20),
    "replication_count": (1, 3),
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one publisher; the same on every rank. Credentials are never part of it. docs/publisher.md lists all.

    Raises:
        ValueError: no or two cadences, an empty or "default" version, or a number out of range.
    """

    project: str
    view: str
    version: str  # required, and never "default": serving reads that one
    every_steps: int | None = None
    every_minutes: float | None = None
    entity: str = "default_dynemb_entity"
    naming: Naming = "fqn"
    upload_format: Literal["arrow", "json"] = "arrow"
    embedding_type: EmbeddingType = "float32"  # int8: rowwise, with an fp16 scale and offset (delta.quantise)
    endpoint: str | None = None  # host[:port], reached over https unless it is this machine
    region: str = "cn-hangzhou"
    batch_size: int = 1000  # rows; at most the SDK's own batch size is used, so one write is one batch
    max_workers: int = 4  # batches per window
    queue_steps_max: int = 8
    queue_bytes_max: int = 1 << 30
    retry_attempts_max: int = 8
    retry_delay_ms_min: int = 100
    retry_delay_ms_max: int = 10_000
    flush_timeout_s: float = 300.0  # longest time one window may take before the rank is told
    close_timeout_s: float = 600.0
    progress_s: float = 10.0  # an upload that takes longer says how far it is, this often
    ttl_s: int = 1_296_000
    shard_count: int = 1
    replication_count: int = 1
    restart: Literal["repair", "pending-only"] = "repair"  # the second: for an SDK that cannot list changed rows
    retain: str | None = None  # folder or s3://BUCKET/PREFIX that gets a copy of every acknowledged delta
    spill: str | None = None  # the same for what could not be delivered: `deltaproof resend`
    settle_s: float = 2.0  # a restart waits this long for the last requests of the job before it

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a TOML file whose keys are the fields of this class.

        Raises:
            ValueError: names the file, the key, and what to do. Never repeats what stands in a key it does not know.
        """
        try:
            found = msgspec.toml.decode(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); name a TOML file of settings") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        for key in sorted(found.keys() - set(cls.__struct_fields__)):
            raise ValueError(f"{path}: key {key!r} {_cure(key, cls.__struct_fields__)}")
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            key = f"key {where[:-1]!r}: " if where else ""
            raise ValueError(f"{path}: {key}{what}; docs/publisher.md says what each key takes") from None

    def __post_init__(self) -> None:
        for field in _fields(type(self)):  # of a TOML file they have been checked, of a call not
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise ValueError(f"setting {field.name}: {error}; docs/publisher.md says what it takes") from None
        for name in ("project", "view", "entity"):
            if not getattr(self, name).strip():
                raise ValueError(f"setting {name} is empty")
        check_version(self.version)
        check_endpoint(self.endpoint)
        for name in ("retain", "spill"):
            if (place := getattr(self, name)) is not None and (wrong := wrong_place(place)):
                raise ValueError(f"setting {name} {wrong}")
        if (self.every_steps is None) == (self.every_minutes is None):
            raise ValueError("set exactly one of every_steps and every_minutes")
        ranges = RANGES | {"retry_delay_ms_max": (self.retry_delay_ms_min, 1000 * SECONDS_MAX)}
        for name, (low, high) in ranges.items():
            if (number := getattr(self, name)) is not None and not low <= number <= high:
                raise ValueError(f"setting {name} is {number}, expected {low} to {high}")


_fields = functools.cache(msgspec.structs.fields)


def _cure(key: str, known: tuple[str, ...]) -> str:
    """What to do about a key that is not a setting."""
    if SECRET.search(key):
        return (
            "looks like a credential, which no file should hold: take it out, change it if others could read it, and "
            "set the environment variables that docs/publisher.md names"
        )
    near = difflib.get_close_matches(key, known, 1)
    return f"is unknown; {f'did you mean {near[0]!r}?' if near else 'docs/publisher.md lists the keys'}"


def check_version(version: str) -> None:
    """Raise ValueError for a version that is empty, or that serving reads when it names none."""
    if not version.strip() or version.strip().lower() == "default":
        raise ValueError(f"setting version is {version!r}: name a version of your own, serving reads 'default'")


def wrong_place(where: str) -> str | None:
    """What is wrong with a place for shards, a folder or a URI; None when nothing is to be seen."""
    try:
        uri = urlsplit(where)
    except ValueError as error:
        return f"is no URI ({error}): give a folder or s3://BUCKET/PREFIX"
    if "@" in uri.netloc or any(SECRET.search(name) for name, _ in parse_qsl(uri.query)):
        return "holds a login: give s3://BUCKET/PREFIX, and the login in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return None if where.strip() else "is empty: give a folder or s3://BUCKET/PREFIX"


def check_endpoint(endpoint: str | None) -> None:
    """Raise ValueError for an endpoint that is no host, or that would get the credentials in clear text.

    Its text is repeated only in parts: people paste logins into it.
    """
    if endpoint is None:
        return
    scheme, found, rest = endpoint.partition("://")
    scheme, place = (scheme.lower(), rest.rstrip("/")) if found else ("", endpoint)
    if not re.fullmatch(r"(?a)(?:[\w.-]+|\[[\da-fA-F:.]+\])(?::\d{1,5})?", place):
        raise ValueError("setting endpoint is not host, host:port or https://host:port, without a login or a path")
    host = re.sub(r":\d+$", "", place).strip("[]")
    if scheme not in ("", "https") and not (scheme == "http" and _is_loopback(host)):
        here = f"{scheme}://{host}"
        raise ValueError(f"setting endpoint: {here} would get the credentials in clear text, use https://{host}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

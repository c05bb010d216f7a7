"""Where ranks keep copies of what they published: faults of that disk, and what lies on it after a run.

The faults strike what is written through ``open()``. Reading shares no code with any target: a shard is a Parquet file,
and the JSON file of the same name beside it, its manifest, vouches for it (docs/readback.md).
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .faults import DiskCrash, DiskError


class FaultyDisk:
    """Carries out the faults of one rank's disk. ``fired`` is told a fault's index; ``die`` ends the process; ``opens``
    is what opens files, by default the built-in."""

    def __init__(
        self,
        planned: Sequence[tuple[int, DiskCrash] | tuple[int, DiskError]],
        folders: Sequence[str],
        fired: Callable[[int], None],
        die: Callable[[], None],
        opens: Callable[..., Any] | None = None,
    ) -> None:
        self._planned, self._folders = planned, tuple(os.path.join(folder, "") for folder in folders)
        self._fired, self._die = fired, die
        self._writes = 0
        self._lock = threading.Lock()
        self._open = builtins.open if opens is None else opens

    def install(self) -> None:
        """Replace ``open`` for good: a rank's process lives for one run."""
        builtins.open = self.open

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = self._open(file, mode, *args, **kwargs)
        watched = isinstance(file, str | os.PathLike) and set(mode) & set("wax+")
        return _Watched(opened, self) if watched and os.fspath(file).startswith(self._folders) else opened

    def write(self, file: Any, data: Any) -> int:
        """Write, or half-write and fail as planned for this write."""
        with self._lock:
            self._writes += 1
            number = self._writes
        for index, fault in self._planned:
            if fault.nth <= number < fault.nth + (fault.count if isinstance(fault, DiskError) else 1):
                file.write(memoryview(data)[: len(memoryview(data)) // 2])
                file.flush()
                self._fired(index)
                if isinstance(fault, DiskCrash):
                    self._die()
                code = getattr(errno, fault.error) if isinstance(fault, DiskError) else errno.EIO
                raise OSError(code, os.strerror(code), getattr(file, "name", None))
        return int(file.write(data))


class _Watched:
    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        return self._disk.write(self._file, data)


@dataclass(frozen=True)
class Shard:
    """What lies under one name: ``path`` below the folder, without ending. ``manifest``: None when there is none.

    ``rows``: columns embedding_name, key_id, ts, embedding; None when they cannot be read. ``damage`` says in what a
    file that has its final name is not what it has to be; empty when all is well.
    """

    path: str
    manifest: dict[str, Any] | None
    rows: pa.Table | None
    damage: str = ""

    @property
    def acknowledged(self) -> pa.Table | None:
        """Its rows, if the store is said to have acknowledged all of them and nothing speaks against it."""
        vouched = self.manifest is not None and self.manifest.get("state") == "acknowledged" and not self.damage
        return self.rows if vouched else None


def read_shards(folder: Path) -> list[Shard]:
    """Every shard and manifest in and below a folder, by name; files under other names are writes that did not end."""
    paths = [p for p in folder.rglob("*") if p.suffix in (".parquet", ".json")]
    return [_read_shard(folder, stem) for stem in sorted({path.with_suffix("") for path in paths})]


def _read_shard(folder: Path, stem: Path) -> Shard:
    name = str(stem.relative_to(folder))
    shard, beside = (Path(f"{stem}{suffix}") for suffix in (".parquet", ".json"))
    manifest: dict[str, Any] | None = None
    rows: pa.Table | None = None
    damage = []
    if beside.exists():
        try:
            manifest = json.loads(beside.read_bytes())
        except ValueError:
            damage.append("the manifest is torn")
    if not shard.exists():
        return Shard(name, manifest, None, "; ".join([*damage, "there is a manifest and no shard"]))
    content = shard.read_bytes()
    if manifest is not None and hashlib.sha256(content).hexdigest() != manifest.get("sha256"):
        damage.append("the shard is not the one that its manifest vouches for")
    try:
        rows = pq.read_table(io.BytesIO(content), columns=["embedding_name", "key_id", "ts", "embedding"])
    except (pa.ArrowException, OSError):
        damage.append(f"the shard is torn: {len(content)} bytes that are no Parquet file")
    if rows is not None and manifest is not None and rows.num_rows != manifest.get("rows"):
        damage.append(f"the shard has {rows.num_rows} rows, its manifest says {manifest.get('rows')}")
    return Shard(name, manifest, rows, "; ".join(damage))


def corrupt(folder: Path, nth: int) -> str | None:
    """Flip a bit in the middle of the nth shard by name (1 the first, -1 the last); its path, None without one."""
    shards = sorted(folder.rglob("*.parquet"))
    if not 1 <= abs(nth) <= len(shards):
        return None
    path = shards[nth - 1 if nth > 0 else nth]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return str(path.relative_to(folder))

"""Uploaders for the process engine's tests of both seams."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

from deltaproof.conformance.target import RankContext, claims

ENOUGH = threading.Event()


def place(context: RankContext) -> Path:
    return Path(tempfile.gettempdir()) / f"deltaproof_seam_targets-{context.run}"


@claims("arrow")
class Files:
    """A store of its own: a file per rank, in a folder that is named after the run."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.rows = context, {}  # type: ignore[var-annotated]

    def start(self) -> None:
        assert self.context.shared is None
        assert dist.get_world_size(self.context.process_group) == self.context.world_size
        place(self.context).mkdir(exist_ok=True)

    def submit(self, step: int, table: pa.Table) -> None:
        for row in table.to_pylist():
            self.rows[f"{self.context.names[row['table_fqn']]} {row['key_id']}"] = row["embedding"]

    def check_error(self) -> None: ...

    def close(self, drain: bool) -> None:
        (place(self.context) / f"{self.context.rank}.json").write_text(json.dumps(self.rows))

    @staticmethod
    def contents(context: RankContext) -> Iterator[tuple[str, int, Any]]:
        for path in place(context).iterdir():
            for name, values in json.loads(path.read_text()).items():
                yield name.split(" ")[0], int(name.split(" ")[1]), values
        shutil.rmtree(place(context))


class Hangs(Files):
    @staticmethod
    def contents(context: RankContext) -> Any:
        ENOUGH.wait()
        return Files.contents(context)

"""S34: keys pass through a float, and those above 2**53 change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ...reference.uploader import Uploader
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Send keys by way of float64, as JSON numbers and many data frames do."""

    def write(uploader: Any, rows: pa.RecordBatch, ts: int) -> None:
        column = rows.schema.get_field_index(uploader._view.sk_field)
        keys = np.clip(rows.column(column).to_numpy().astype(np.float64), -(2.0**62), 2.0**62).astype(np.int64)
        original(uploader, rows.set_column(column, uploader._view.sk_field, pa.array(keys)), ts)

    original = patch.replace(Uploader, "_write", write)


SPECIMEN = Specimen(
    id="S34",
    slug="key-float",
    title="keys pass through a float, and those above 2**53 change",
    cause="Keys of dynamic tables are hashes, any 64 bits. Somewhere on the way they are a float for a moment: a JSON "
    "number, a column with a missing value. The last ten bits are gone, the row is published under a key that "
    "nobody asks for, and the one that is asked for keeps its older row or has none.",
    family="data",
    properties=("no-lost-rows",),
    scenario=Scenario(
        name="S34-key-float",
        seed=34,
        tables=(Table(name="item", rows=12), Table(name="ad", owner="dyn", rows=40, sharding="dynamic")),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
    ),
    apply=apply,
)

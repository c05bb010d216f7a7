"""S38: a shard is written in place, and a crash leaves a part of it."""

from __future__ import annotations

import os
from typing import Any

from ...reference.shards import Files, make_folder
from ...simulator.faults import DiskCrash
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Write a file under the name by which readers will find it."""

    def write_file(files: Any, path: str, data: Any) -> None:
        make_folder(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    patch.replace(Files, "_write_file", write_file)


SPECIMEN = Specimen(
    id="S38",
    slug="torn-shard",
    title="a shard is written in place, and a crash leaves a part of it",
    cause="The file is opened under its final name and written from beginning to end. The machine goes down half-way; "
    "what is left looks like a shard to whoever lists the folder. Readers that check nothing stop at it, and "
    "those that tolerate it skip rows which the store has.",
    family="disk",
    properties=("retained-equals-store",),
    scenario=Scenario(
        name="S38-torn-shard",
        seed=38,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=2, retain=True),
        faults=(DiskCrash(rank=1, nth=3),),
    ),
    apply=apply,
)

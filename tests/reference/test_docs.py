"""docs/publisher.md and docs/restart.md say what the code does."""

from __future__ import annotations

import json
import re
import runpy
import typing
from pathlib import Path
from typing import Any

import msgspec

from deltaproof.reference import contract, delta, dynamic, errors, publisher, restart, shards, uploader
from deltaproof.reference.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHER, RESTART = (DOCS / "publisher.md").read_text(), (DOCS / "restart.md").read_text()


def takes(kind: Any) -> str:
    """How the page says what a key takes."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f'`"{choice}"`' for choice in typing.get_args(kind))
    first = typing.get_args(kind)[0] if typing.get_args(kind) else kind
    return {str: "string", int: "int", float: "float"}[first]


def test_the_settings_are_those_of_the_code_in_its_order() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \| (\S+) \| .+ \|$", PUBLISHER.partition("## Settings")[2], re.M)
    expected = []
    for field in msgspec.structs.fields(Settings):
        default = "-" if field.default is None else "required"
        if field.default not in (None, msgspec.NODEFAULT):
            default = f"`{json.dumps(field.default)}`"
        expected.append((field.name, takes(field.type), default))
    assert listed == expected


def test_the_example_file_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", PUBLISHER, re.S)
    (tmp_path / "publisher.toml").write_text(text)
    assert Settings.load(tmp_path / "publisher.toml").every_minutes == 5


def test_the_errors_and_variables_exist() -> None:
    modules = (contract, delta, dynamic, errors, publisher, restart, shards, uploader)
    named = set(re.findall(r"`(\w+Error)`", PUBLISHER))
    assert named == {
        "UploadError",
        "DeltaError",
        "PublisherError",
        "RestartError",
        "TrackerError",
        "ContractError",
        "ShardError",
    }
    assert all(any(hasattr(module, name) for module in modules) for name in named)
    assert {name for name in errors.SECRET_VARIABLES if f"`{name}`" not in PUBLISHER} == set()


def test_the_shardings_and_kernels_are_the_trackers() -> None:
    tracker = (Path(publisher.__file__).with_name("tracker.py")).read_text()
    for constant in ("SHARDINGS", "KERNELS"):
        [names] = re.findall(rf"^{constant} = \((.*)\)$", tracker, re.M)
        assert re.findall(r'"(\w+)"', names), constant
        assert all(f"`{name}`" in PUBLISHER for name in re.findall(r'"(\w+)"', names))
    [supported] = re.findall(r'^VERSIONS = f"the tracker knows torchrec (1\.\d to 1\.\d)', tracker, re.M)
    assert f"torchrec {supported}" in PUBLISHER


def test_a_state_is_described_field_by_field() -> None:
    section = RESTART.partition("## What a state holds")[2].partition("##")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(restart.RankState.__struct_fields__)


def test_the_number_of_planted_bugs_is_right() -> None:
    bugs = runpy.run_path(str(Path(__file__).with_name("test_convergence.py")))["BUGS"]
    assert f"finds each of {len(bugs)} bugs" in RESTART.replace("\n", " ")


def test_links_lead_somewhere() -> None:
    for page in (PUBLISHER, RESTART):
        for target in re.findall(r"\]\(([^)#]+)\)", page):
            assert (DOCS / target).exists(), target

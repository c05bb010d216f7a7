"""The fixtures that the installed package brings, in a pytest of their own, alone and under xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pyarrow as pa
import pytest

@pytest.mark.parametrize("number", range(4))
def test_a_store_of_its_own(feature_store, feature_store_client, number):
    project = feature_store_client.get_project("deltaproof")
    assert feature_store.store.views() == []
    project.create_entity("item", "item_id")
    view = project.create_dynamic_embedding_feature_view("view", "item")
    embedding = pa.array([[1.0]], pa.list_(pa.float32()))
    batch = pa.table({"embedding_name": ["t"], "key_id": [number], "embedding": embedding})
    view.write_features_arrow(batch=batch, version="v1", ts=5)
    assert view.write_flush()["failed_records"] == 0
    assert feature_store.store.rows("deltaproof", "view", "v1") == 1
    assert {entry.client for entry in feature_store.requests()} == {"pytest"}

def test_the_server_alone(feature_store):
    assert feature_store.endpoint.startswith("127.0.0.1:")
"""
CHEAP = """
import sys

def test_nothing_heavy_is_imported_for_tests_that_do_not_ask():
    assert "deltaproof.fakes.pytest_plugin" in sys.modules
    assert not {"aiohttp", "pyarrow", "numpy", "torch", "urllib3", "hypothesis.strategies"} & set(sys.modules)
"""


def run(folder: Path, suite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(suite)
    # hypothesis and moto bring plugins too: only ours is looked at.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_each_test_gets_a_server_and_a_client(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, SUITE, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_it_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    done = run(tmp_path, CHEAP)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fixtures_say_what_they_are(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--fixtures", "-q")
    for name in ("feature_store", "feature_store_client"):
        assert f"\n{name} -- " in "\n" + done.stdout

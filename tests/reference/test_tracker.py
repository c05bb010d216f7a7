"""The tracker on real sharded TorchRec models, two gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# With the engine's tests: a process has one forkserver, and it takes seconds to start.
pytestmark = pytest.mark.xdist_group("processes")

EBC, DEEP, EC = "ebc.embedding_bags.", "deep.ebc.embedding_bags.", "ec.embeddings."
#: table FQN -> (features, row ranges per rank; None: not there)
LAYOUT: dict[str, tuple[list[str], list[range | None]]] = {
    EBC + "a": (["fa"], [range(26), range(26, 51)]),
    EBC + "b": (["fb", "fa"], [None, range(51)]),
    EBC + "c": (["fc"], [range(51), range(51)]),
    EBC + "e": (["fa", "fb"], [range(26), range(26, 51)]),
    EBC + "fp16": (["fc"], [range(51), None]),
    DEEP + "a": (["fb"], [range(51), None]),
    EC + "a": (["fa"], [range(26), range(26, 51)]),
    EC + "d": (["fa"], [range(51), None]),
}


@pytest.fixture(scope="module")
def drawn() -> Callable[[int, int], dict[str, tuple[list[int], list[int]]]]:
    """The batches of tracker_rank.py, without its imports."""

    def batch(rank: int, step: int) -> dict[str, tuple[list[int], list[int]]]:
        rng = np.random.default_rng([rank, step])
        found = {}
        for feature in ("fa", "fb", "fc"):
            lengths = rng.integers(0, 4, 3)
            found[feature] = (lengths.tolist(), rng.integers(0, 51, lengths.sum()).tolist())
        return found

    return batch


def expected_keys(drawn: Any, fqn: str, rank: int, steps: tuple[int, ...], quiet: tuple[str, ...] = ()) -> list[int]:
    features, ranges = LAYOUT[fqn]
    hosted = ranges[rank]
    sources = [rank] if fqn == EBC + "c" else [0, 1]  # a data-parallel table sees the rank's own batch
    ids = [
        key
        for source in sources
        for step in steps
        for feature in features
        if feature not in quiet
        for key in drawn(source, step)[feature][1]
    ]
    return sorted({key for key in ids if hosted is not None and key in hosted})


def keys_of(drained: dict[str, np.ndarray]) -> dict[str, list[int]]:
    assert all(keys.dtype == np.int64 for keys in drained.values())
    return {fqn: keys.tolist() for fqn, keys in drained.items()}


def test_the_ids_of_every_sharding_become_global_keys_of_their_own_table(ranks: Any, drawn: Any) -> None:
    for rank, (infos, intervals, hosted) in enumerate(ranks("follow")):
        assert hosted == {fqn: list(of[rank] or ()) for fqn, (_, of) in LAYOUT.items()} | {"ec.embeddings.unknown": []}
        assert {fqn: (hosted, features) for fqn, (_, hosted, _, features) in infos.items()} == {
            fqn: (ranges[rank] is not None, tuple(features)) for fqn, (features, ranges) in LAYOUT.items()
        }
        shardings = {fqn: sharding for fqn, (sharding, *_) in infos.items()}
        assert shardings[EBC + "a"] == shardings[EC + "a"] == "row_wise"
        assert shardings[EBC + "b"] == shardings[DEEP + "a"] == "table_wise"
        assert shardings[EBC + "c"] == "data_parallel"
        for steps, (drained, rows, before, after) in zip(((1, 2), (3, 4)), intervals, strict=True):
            expected = {fqn: expected_keys(drawn, fqn, rank, steps) for fqn in LAYOUT}
            assert keys_of(drained) == {fqn: keys for fqn, keys in expected.items() if keys}
            for fqn, keys in drained.items():
                first, held = after[fqn]
                assert rows[fqn].dtype == np.float32
                assert rows[fqn].tobytes() == held[keys - first].tobytes()
            for fqn, (first, held) in after.items():
                changed = np.flatnonzero((held != before[fqn][1]).any(axis=1)) + first
                seen = set(drained.get(fqn, np.array([])).tolist())
                if fqn == EBC + "c":  # replicas move by every rank's ids; each rank reports its own
                    seen = {key for other in (0, 1) for key in expected_keys(drawn, fqn, other, steps)}
                assert set(changed.tolist()) <= seen
                assert len(changed), f"{fqn} never changed: the test shows nothing"


def test_evaluation_quiet_tables_broken_forwards_and_new_storage(ranks: Any, drawn: Any) -> None:
    for rank, seen in enumerate(ranks("live")):
        assert seen["evaluated"] == {}
        assert seen["broke"] == "injected"
        quiet, after = keys_of(seen["quiet"]), keys_of(seen["after"])
        for fqn in LAYOUT:
            assert after.get(fqn, []) == expected_keys(drawn, fqn, rank, (5,))
        assert DEEP + "a" not in quiet
        assert EBC + "a" in quiet
        assert np.allclose(seen["grown"], 1.0, atol=1e-5)
        first_row = 26 * rank
        assert f"DeltaError: id outside this rank's {26 - rank} rows from row {first_row}" in seen["outside"]
        assert f"key {26 + first_row}" in seen["outside"]
        assert seen["outside again"] == seen["outside"], "a drain that raised forgot the id"
        assert keys_of(seen["kept"]) == {EBC + "c": [1, 3]}, "a drain that raised forgot the ids of another table"
        assert f"key {first_row - 3}," in seen["negative"], "only the greatest of the ids was looked at"


def test_two_real_ranks_publish_every_changed_row_bitwise(ranks: Any) -> None:
    published = ranks("publish")
    compared = 0
    store: dict[tuple[str, int], Any] = {}
    for stored, _, _ in published:
        store |= stored
    for _, before, after in published:
        for fqn, (first, held) in after.items():
            for row in np.flatnonzero((held != before[fqn][1]).any(axis=1)):
                assert np.array(store[fqn, int(row) + first], np.float32).tobytes() == held[row].tobytes()
                compared += 1
    assert compared > 200
    assert {fqn for fqn, _ in store} == set(LAYOUT)


def test_models_that_cannot_be_followed_are_refused_with_the_reason(ranks: Any) -> None:
    (messages,) = ranks("refuse", world_size=1)
    assert "is sharded column_wise; only row_wise, table_wise, data_parallel" in messages["column"]
    assert "'ebc' is not sharded" in messages["unsharded"]
    assert "has no sharded EmbeddingBagCollection" in messages["none"]
    assert "two tables have the name 'x._dmp_wrapped_module.ebc.embedding_bags.a'" in messages["twice"]
    assert "has no '_embedding_module'; the tracker knows torchrec 1.6 to 1.9, this is " in messages["collision"]
    assert "'mc_ebc._embedding_module' is not sharded" in messages["unsharded zch"]
    assert "hashes ids before it remaps them (input_hash_func)" in messages["hashed"]
    assert "remaps ids by HashZchManagedCollisionModule; only MCHManaged" in messages["hash zch"]
    assert "in kernel key_value" in messages["kernel"]
    assert messages["cleared"] == 0
    assert messages["folded"] == (8, [1, 2, 3], 3)  # never more ids than the bound
    assert messages["folded on a GPU"] == ("cuda", True), "ids left the device they were looked up on"
    for message in messages["replaced"]:
        assert "another tracker was registered on 'ebc' after this one" in message
    assert len(messages["replaced"]) == 2
    assert "'ebc' looked up without telling its tracker; the tracker knows torchrec 1.6 to 1.9" in messages["silent"]
    assert "'ebc.embedding_bags.b' has no rows on this rank" in messages["elsewhere"]


MC_EBC, MC_EC = "mc_ebc._embedding_module.embedding_bags.", "mc_ec._embedding_module.embeddings."
#: table FQN -> the model's answers in which its rows appear
ZCH = {MC_EBC + "t": ["mc_ebc fa"], MC_EBC + "u": ["mc_ebc fb", "mc_ebc fc"], MC_EC + "t": ["mc_ec fc"]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_raw_id_ever_published_has_the_row_that_the_model_serves_for_it_now(ranks: Any, world_size: int) -> None:
    found = ranks("zch", world_size=world_size)
    pool = raw_ids()
    store: dict[tuple[str, int], bytes] = {}
    untouched = moved = 0
    for interval in range(len(found[0][0])):
        draws, publications, served = zip(*(of_rank[0][interval] for of_rank in found), strict=True)
        drawn = {key for few in draws for key in few.tolist()}
        for published in publications:
            for fqn, (keys, rows) in published.items():
                assert keys.dtype == np.int64
                assert keys.tolist() == sorted(set(keys.tolist()))
                for key, row in zip(keys.tolist(), rows, strict=True):
                    untouched += key not in drawn
                    moved += store.get((fqn, key), row.tobytes()) != row.tobytes() and key not in drawn
                    store[fqn, key] = row.tobytes()
        for fqn, answers in ZCH.items():
            for answer in answers:
                for key, row in zip(pool.tolist(), served[0][answer], strict=True):
                    assert store.get((fqn, key), row.tobytes()) == row.tobytes(), (interval, fqn, key)
    assert {fqn for fqn, _ in store} == set(ZCH)
    assert len(store) > 50, "few ids were published: the test shows nothing"
    assert moved > 20, "hardly any id changed without being looked up: the test shows nothing"


def test_each_raw_id_is_hosted_by_the_rank_that_publishes_it(ranks: Any) -> None:
    found = ranks("zch")
    pool = raw_ids()
    for fqn in ZCH:
        masks = np.array([hosted[fqn] for _, hosted, _, _ in found])
        assert masks.sum(axis=0).tolist() == [1] * len(pool)
        for (intervals, hosted, after, tables), rank_mask in zip(found, masks, strict=True):
            assert not hosted["unknown"].any()
            assert after == {}, "a copy of the model was taken for the model in training"
            assert (tables[fqn].sharding, tables[fqn].hosted) == ("row_wise", True)
            theirs = set(pool[~rank_mask].tolist())
            for _, published, _ in intervals:
                assert not theirs & set(published.get(fqn, (np.array([]),))[0].tolist())


def test_ids_of_a_dynamic_table_go_to_the_source_that_has_its_rows(ranks: Any, drawn: Any) -> None:
    for rank, (drained, again, rows, tables, beside) in enumerate(ranks("elsewhere")):
        expected = {fqn: expected_keys(drawn, fqn, rank, (1,)) for fqn in LAYOUT}
        assert keys_of(drained) == {fqn: keys for fqn, keys in expected.items() if keys}
        assert again == {}
        assert rows.tolist() == [[7, 7], [0, 0]]
        assert tables == sorted(LAYOUT)
        assert beside == {EBC + "b": True}, "a table grouped with a dynamic one was not found"


def test_a_source_that_was_released_leaves_the_model_to_the_next_one(ranks: Any) -> None:
    for found in ranks("again"):
        assert len(found) == 6
        for first, second, left in (found[:3], found[3:]):
            for seen, later, nothing in (first, second):
                assert seen
                assert nothing == {}
                assert keys_of(seen) == keys_of(later)
            assert left == (0, [])


def test_tracking_and_draining_cause_no_collective(ranks: Any) -> None:
    for without, tracked, drained in ranks("quiet"):
        assert without == tracked > 0
        assert drained == 0


def test_torchrecs_own_tracker_and_this_one_see_the_same_lookups(ranks: Any, drawn: Any) -> None:
    for rank, found in enumerate(ranks("beside")):
        alone, _ = found["alone"]
        before, ours = found["before"]
        assert alone == before, "TorchRec's tracker lost lookups to this one"
        first_rows = {EBC + "a": 26 * rank}
        assert keys_of(ours) == {fqn: [i + first_rows.get(fqn, 0) for i in ids] for fqn, ids in before.items() if ids}
        assert EBC + "a" in ours
        assert "another tracker was registered on 'ebc' after this one" in found["after"][1]


def test_lookups_are_noted_however_a_release_calls_back_and_a_strange_interface_is_refused(ranks: Any) -> None:
    ((seen, names, refused, version, tracked),) = ranks("signatures", world_size=1)
    assert tracked == [EBC + "a", EBC + "b"], "a lookup of another thread took a turn of this one's forward"
    assert list(seen.values()) == [[3, 7]] * 3
    assert set(refused) == {name for absent in names.values() for name in absent}
    for name, message in refused.items():
        assert f"has no {name!r}; the tracker knows torchrec 1.6 to 1.9, this is {version}; install one" in message


def test_a_torchrec_that_lacks_a_class_is_refused_with_both_versions(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torchrec").mkdir()
    (tmp_path / "torchrec" / "__init__.py").write_text("__version__ = '2.0.0'\n")
    command = [sys.executable, "-c", "import deltaproof.reference.tracker"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "TrackerError: No module named 'torchrec.distributed'; the tracker knows torchrec 1.6 to 1.9" in done.stderr
    assert "this is 2.0.0" in done.stderr


def raw_ids() -> np.ndarray:
    """Those of torch_rank.py."""
    spread = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 24)
    return np.array([*spread, 0, 5, -2, -(2**63), 2**63 - 2, 2**63 - 1], np.int64)

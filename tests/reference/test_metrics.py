from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deltaproof.reference.metrics import COUNTERS, GAUGES, register
from deltaproof.reference.uploader import Uploader, UploadError


@pytest.fixture
def uploader(kit: Any) -> Uploader:
    view = kit.view(["lost"])
    made = Uploader(view, kit.settings(batch_size=2), 0, 1)
    made.start()
    return made


def test_every_number_has_a_meaning_and_every_meaning_a_number(uploader: Uploader) -> None:
    named = {f"deltaproof_{name}_total" for name in COUNTERS} | {f"deltaproof_{name}" for name in GAUGES}
    assert uploader.metrics().keys() == named
    uploader.close()


def test_numbers_follow_what_was_sent_and_what_waits(kit: Any) -> None:
    view = kit.view()
    view.script = ["lost", view.hold()]
    uploader = Uploader(view, kit.settings(batch_size=2), 0, 1)
    assert set(uploader.metrics().values()) == {0}
    uploader.start()
    tables = [kit.delta(step, range(step)) for step in (5, 10)]
    for step, table in zip((5, 10), tables, strict=True):
        uploader.submit(step, table)
    assert view.entered.wait(kit.deadline_s)
    waiting = uploader.metrics()
    assert waiting["deltaproof_queue_steps"] == 2
    assert waiting["deltaproof_queue_bytes"] == sum(table.nbytes for table in tables)
    assert waiting["deltaproof_lag_steps"] == 6  # steps 5 to 10
    assert 0 < waiting["deltaproof_lag_seconds"] < kit.deadline_s
    assert waiting["deltaproof_failures_total"] == waiting["deltaproof_retries_total"] == 1
    view.release.set()
    uploader.drain()
    sent = uploader.metrics()
    assert {name: sent[f"deltaproof_{name}_total"] for name in ("steps", "rows", "batches")} == {
        "steps": 2,
        "rows": 15,
        "batches": 8,
    }
    assert sent["deltaproof_bytes_total"] >= 15 * (8 + 4 * 2)
    assert [sent[f"deltaproof_{name}"] for name in GAUGES] == [0, 0, 0, 0]
    view.script, view.entered, view.release = [view.hold("fatal")], type(view.entered)(), type(view.release)()
    uploader.submit(12, kit.delta(12, [1]))
    assert uploader.metrics()["deltaproof_lag_steps"] == 2  # 10 is acknowledged
    view.release.set()
    with pytest.raises(UploadError):
        uploader.close()
    assert uploader.metrics()["deltaproof_failures_total"] == 2
    assert uploader.metrics()["deltaproof_retries_total"] == 1


def test_prometheus_scrapes_the_same_numbers(kit: Any, uploader: Uploader) -> None:
    registry = CollectorRegistry()
    collector = register(uploader.metrics, registry, rank=3, view="v")
    uploader.submit(1, kit.delta(1, range(3)))
    uploader.drain()
    text = generate_latest(registry).decode()
    assert 'deltaproof_rows_total{rank="3",view="v"} 3.0' in text
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert {name: value for name, (_, value) in samples.items()} == uploader.metrics()
    assert all(labels == {"rank": "3", "view": "v"} for labels, _ in samples.values())
    for name, what in (COUNTERS | GAUGES).items():
        assert f"# HELP deltaproof_{name} {what}" in text
    registry.unregister(collector)
    assert generate_latest(registry) == b"# EOF\n"
    uploader.close()


def test_registering_reads_nothing_yet() -> None:
    register(lambda: {}[0], CollectorRegistry())  # type: ignore[index]

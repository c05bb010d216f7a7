"""What the numbers of `Uploader.metrics()` mean, and a collector that gives them to `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

COUNTERS = {  # deltaproof_…_total
    "steps": "Submitted deltas that the store acknowledged.",
    "rows": "Rows that the store acknowledged, those of replays again.",
    "bytes": "Bytes of acknowledged deltas, as Arrow tables.",
    "batches": "Batches of those rows, as many requests.",
    "failures": "Attempts that failed: to send, retain or spill a delta.",
    "retries": "Attempts made after one that failed.",
    "reconnects": "Clients made because a token had expired.",
    "spilled_rows": "Rows that were given up and spilled.",
}
GAUGES = {  # deltaproof_…
    "queue_steps": "Deltas that are not acknowledged.",
    "queue_bytes": "Bytes of those deltas.",
    "lag_steps": "Steps from the last one acknowledged to the last one submitted.",
    "lag_seconds": "Age of the oldest delta that is not acknowledged.",
}


class Collector:
    """Reads the metrics when somebody scrapes; nothing is kept or computed in between.

    Args:
        read: `uploader.metrics`. labels: put on every number, such as rank, view and version.
    """

    def __init__(self, read: Callable[[], Mapping[str, int | float]], labels: Mapping[str, object]) -> None:
        self._read, self._labels = read, {name: str(value) for name, value in labels.items()}

    def collect(self) -> Iterator[Any]:
        """Metric families, for `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = self._read()
        for described, family, end in (COUNTERS, CounterMetricFamily, "_total"), (GAUGES, GaugeMetricFamily, ""):
            for name, what in described.items():
                metric = family(f"deltaproof_{name}", what, labels=list(self._labels))
                metric.add_metric(list(self._labels.values()), values[f"deltaproof_{name}{end}"])
                yield metric

    def describe(self) -> list[Any]:
        """Nothing: registering must not read an uploader that may not have started."""
        return []


def register(read: Callable[[], Mapping[str, int | float]], registry: Any = None, **labels: object) -> Collector:
    """Have `prometheus_client` (its default registry, unless another is given) scrape what `read` returns.

    `register(publisher.uploader.metrics, rank=rank, view=settings.view)`; `registry.unregister(collector)` ends it.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    from prometheus_client.core import REGISTRY

    collector = Collector(read, labels)
    (REGISTRY if registry is None else registry).register(collector)
    return collector

"""The property ``bounded-memory``."""

from __future__ import annotations

import pyarrow.compute as pc

from ...simulator.history import Event, History
from .. import evidence
from ..verdict import Finding, Violation

#: Bytes that a rank's memory may grow by besides the queue: what allocators keep, a window on its way, the model's own.
ALLOWANCE_BYTES = 32 << 20


def bounded_memory(history: History) -> Finding:
    """While the store is slow or away, the memory that a rank holds for rows not yet sent stays within the bound that
    the publisher was given (``queue_bytes_max``); training waits instead.

    Without such a bound an outage of ten minutes ends the job by running out of memory, hours of training after the
    cause, and takes every pending row with it (S42). What is measured is the resident memory of the rank's process,
    after each step, against the first such measure: whatever a target keeps, and in whichever form. Allocators keep
    what they once had, and the model itself allocates, so ``ALLOWANCE_BYTES`` come on top; a rank that published less
    than bound and allowance together could not break the rule and is not judged.
    """
    finding = Finding("bounded-memory", unit="samples")
    allowed = history.scenario.publisher.queue_bytes_max + ALLOWANCE_BYTES
    writers = evidence.writers(history)
    width = history.writes["embedding"].type.value_type.bit_width // 8
    lengths = pc.list_value_length(history.writes["embedding"].combine_chunks()).fill_null(0).to_numpy()
    for rank in range(history.ranks_max):
        if width * int(lengths[writers == rank].sum()) <= allowed:
            continue
        samples = [e for e in history.of(f"rank{rank}", "after-step") if e.data.get("resident_bytes")]
        finding.checked += len(samples)
        bases: dict[int, int] = {}  # by attempt: each is a process of its own
        for sample in samples:
            bases.setdefault(sample.attempt, sample.data["resident_bytes"])

        def violation(sample: Event, rank: int = rank, bases: dict[int, int] = bases) -> Violation:
            grown = (sample.data["resident_bytes"] - bases[sample.attempt]) / 2**20
            return Violation(
                property=finding.property,
                message=f"the memory of rank {rank} has grown by {grown:.0f} MiB since its first step; its queue may "
                f"hold {history.scenario.publisher.queue_bytes_max / 2**20:.0f} MiB, and {ALLOWANCE_BYTES / 2**20:.0f} "
                "MiB are allowed besides",
                rank=rank,
                step=sample.step,
                events=evidence.events_about(history, rank, sample.step, until_ms=sample.t_ms),
            )

        grown = [s for s in samples if s.data["resident_bytes"] - bases[s.attempt] > allowed]
        finding.report(grown, violation)
    if not finding.checked:
        finding.reason = f"no rank published more than {allowed / 2**20:.0f} MiB, so none could have piled up that much"
    return finding

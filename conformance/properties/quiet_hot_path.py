"""The property ``quiet-hot-path``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...simulator.history import Event, History
from .. import evidence
from ..verdict import Finding, Violation

#: Keys of one rank and table whose values are followed: those with the most accepted rows show the most dumps.
KEYS_FOLLOWED = 32


def quiet_hot_path(history: History) -> Finding:
    """A publisher adds no collective to a training step, and dumps no more often than its cadence asks.

    A collective in ``after_step`` makes every rank wait for the slowest, thousands of times between two dumps, and
    turns a rank that is late or gone into a job that hangs (S18: an all-reduce per step, only to vote whether a minute
    is over). Dumps in a row are as bad: a rank that stood still for some minutes and then makes up for every deadline
    it missed stalls all its peers once more (S17). Collectives are counted by call site while the target is called.
    Dumps cannot be counted from outside, but each value of a key which the model held for a while and the store
    accepted was read from the model within that while: n values of one key, held one after the other, took n dumps. A
    sequence of deadlines skips what it missed and keeps its phase, so that n + 1 dumps span more than n - 1 periods;
    each failed flush may have been a replay that read the model anew, and excuses one. The final flush obeys no
    cadence; it publishes what is held to the end, and that counts for none.
    """
    finding = Finding("quiet-hot-path", unit="calls")
    writers = evidence.writers(history)
    for rank in range(history.ranks_max):
        calls = list(history.of(f"rank{rank}", "after-step"))
        finding.checked += len(calls)

        def collective(call: Event, rank: int = rank) -> Violation:
            sites = ", ".join(f"{n} x {site}" for site, n in call.data["collectives"].items())
            return Violation(
                property=finding.property,
                message=f"after_step() of rank {rank} took part in collectives: {sites}",
                rank=rank,
                step=call.step,
                events=evidence.events_about(history, rank, call.step, until_ms=call.t_ms),
            )

        finding.report([c for c in calls if c.data.get("collectives")], collective)
        clocks = [_Clock(history, rank, attempt) for attempt in range(len(history.starts))]
        bursts = [b for clock in clocks for fqn in history.tables for b in _bursts(history, rank, fqn, clock, writers)]

        def burst(found: _Burst, rank: int = rank) -> Violation:
            publisher = history.scenario.publisher
            unit = "steps" if publisher.every_minutes is None else "s"
            return Violation(
                property=finding.property,
                message=f"rank {rank} dumped this key at least {found.dumps} times within {found.span:g} {unit} of its "
                f"own, at a cadence of {found.period:g} {unit}",
                table=found.fqn,
                name=history.tables[found.fqn].embedding_name,
                key=found.key,
                rank=rank,
                step=found.step,
                events=evidence.events_about(history, rank, found.step),
            )

        finding.report(bursts[:1], burst)  # one key shows a burst as well as another
    if not finding.checked:
        finding.reason = "the target was never called after a step"
    return finding


class _Burst(NamedTuple):
    fqn: str
    key: int
    step: int
    dumps: int
    span: float
    period: float


class _Clock:
    """What a rank's cadence counts in: its own steps, or seconds of its monotonic clock, by the history's step."""

    def __init__(self, history: History, rank: int, attempt: int) -> None:
        publisher = history.scenario.publisher
        minutes = publisher.every_minutes
        self.period = float(publisher.every_steps) if minutes is None else 60.0 * minutes
        steps = history.of(f"rank{rank}", "step")
        count = "own_step" if minutes is None else "clock_s"
        moments = ((history.moment(event), event.data) for event in steps if event.attempt == attempt)
        self.now = {step: float(data[count]) for step, data in moments if step is not None and count in data}
        flushes = history.of(f"rank{rank}", "sdk-flush")
        self.failed_flushes = sum(1 for e in flushes if e.data.get("failed_batches") or e.data.get("errors"))


def _bursts(history: History, rank: int, fqn: str, clock: _Clock, writers: np.ndarray) -> Iterator[_Burst]:
    """The worst run of dumps of each followed key that comes too fast."""
    now, period, failed = clock.now, clock.period, clock.failed_flushes
    rows = evidence.written(history)[fqn]
    mine = np.flatnonzero((writers[rows.index] == rank) & (rows.last != evidence.NEVER))
    keys, counts = np.unique(rows.keys[mine], return_counts=True)
    for key in keys[np.argsort(-counts, kind="stable")][:KEYS_FOLLOWED].tolist():
        of_key = mine[rows.keys[mine] == key]
        values = sorted({(int(rows.last[i]), int(rows.first[i])) for i in of_key})
        chain: list[tuple[int, int]] = []  # values held one after the other, as many as there are
        for last, first in values:
            if last != evidence.FOREVER and first in now and last + 1 in now and (not chain or first > chain[-1][1]):
                chain.append((first, last))
        # n + 1 dumps take more than n - 1 periods: with every dump put back by as many periods as came before it, none
        # may end more than one period (and one for each excuse) before an earlier one began.
        slack, start, found = (1 + failed) * period, 0, []
        for n, (first, last) in enumerate(chain):
            if now[first] - n * period >= now[chain[start][0]] - start * period:
                start = n
            span = now[last + 1] - now[chain[start][0]]
            if span < (n - start) * period - slack:
                found.append(_Burst(fqn, key, chain[start][0], 1 + n - start - failed, span, period))
        if found:
            yield max(found, key=lambda burst: burst.dumps)

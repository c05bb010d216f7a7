"""What the reference's uploader costs by itself, on one core: over an SDK view that discards every batch.

An upload is timed whole, from `submit` to the acknowledgement: validation, slicing into batches of the SDK's 1000 rows,
published names, ts, and the check of every flush summary. It is compared with one `numpy.isfinite` pass over the same
embeddings into a mask that exists already: about what reading them once costs. Both sides and all sizes take turns, and
what is compared is medians of one run. Times are the process's CPU times: both threads share one core and wait for each
other only, so on an idle machine that is the time that passes; on a shared one the time that passes would tell of the
neighbours. It is printed too. Memory: what is allocated at most at a time during one upload (Arrow's pool and Python's
and NumPy's allocators), and by how much the process grew (peak RSS), against two windows of batches.

Goals (issue 4): 20 million rows/s at dim 16; 0.60 of the pass's bytes/s at dim 128 and 1e6 rows; time per row of
validation and batching at 1e7 rows at most 1.50 of that at 1e5, in chunks as dumped and in one chunk; memory under two
windows.
Exit code 1 when one is missed (``--report-only``, ``--quick``: 0).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from deltaproof.reference.delta import make_delta, validate
from deltaproof.reference.settings import Settings
from deltaproof.reference.uploader import Uploader

FQN: Final = "model.sparse.ebc.embedding_bags.item"
NAMES: Final = {FQN: "item__ebc"}  # another name than the FQN: the names have to be made
POOLS: Final[list[pa.MemoryPool]] = []  # what was allocated from one must not outlive it
RATE_GOAL, PASS_GOAL, LINEAR_GOAL, MEMORY_GOAL = 20e6, 0.60, 1.50, 2.00


class Took:
    """Seconds: of CPU, and that passed."""

    cpu_s = wall_s = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Took]:
    took, cpu_s, wall_s = Took(), time.process_time(), time.perf_counter()
    yield took
    took.cpu_s, took.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s


class DiscardingView:
    """Counts what it is given, as `write_flush` must, and forgets it."""

    pk_field, sk_field, embedding_field = "embedding_name", "key_id", "embedding"

    def __init__(self, batch_size: int = 1000) -> None:
        self._batch_size, self._max_workers = batch_size, 4
        self._batches = self._rows = 0

    def write_features_arrow(self, batch: pa.RecordBatch, version: str, write_mode: str, ts: int) -> None:
        self._batches += 1
        self._rows += batch.num_rows

    def write_flush(self) -> dict[str, Any]:
        batches, rows = self._batches, self._rows
        self._batches = self._rows = 0
        counts = {"total_batches": batches, "failed_batches": 0, "total_records": rows, "success_records": rows}
        return counts | {"failed_records": 0, "errors": []}


class Case:
    """A delta of `rows` rows, and the array it was made of."""

    def __init__(self, rows: int, dim: int) -> None:
        self.rows, self.dim = rows, dim
        self.values = np.random.default_rng(0).random((rows, dim), np.float32)
        keys = np.arange(rows, dtype=np.int64) * np.int64(0x5851F42D4C957F2D)
        self.table = make_delta(1, 0, 1, "item", FQN, keys, self.values, "dump")
        self.mask = np.empty(self.values.shape, np.bool_)

    def scan(self) -> Took:
        with timed() as took:
            np.isfinite(self.values, out=self.mask)
        return took

    def upload(self) -> Took:
        with running(self.dim) as uploader, timed() as took:
            uploader.submit(1, self.table)
            uploader.drain()
        return took

    def check_and_batch(self, table: pa.Table) -> Took:
        uploader = Uploader(DiscardingView(), settings(), 0, 1, names=NAMES)
        with timed() as took:
            validate(table, {FQN: self.dim})
            rows = sum(batch.num_rows for batch in uploader._batches(table))
        assert rows == self.rows
        return took


def settings(batch_size: int = 1000) -> Settings:
    return Settings(
        project="p", view="v", version="bench", every_steps=1, queue_bytes_max=1 << 40, batch_size=batch_size
    )


@contextlib.contextmanager
def running(dim: int, view: DiscardingView | None = None) -> Iterator[Uploader]:
    view = view or DiscardingView()
    uploader = Uploader(view, settings(view._batch_size), 0, 1, names=NAMES, dims={FQN: dim})
    uploader.start()
    yield uploader
    uploader.close()


def take_turns(sides: dict[Any, Callable[[], Took]], rounds: int) -> dict[Any, list[Took]]:
    """What each round of each side took; all meet the same weather. The first round warms up."""
    took: dict[Any, list[Took]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for name in names:
            once = sides[name]()
            if number:
                took[name].append(once)
        names = names[1:] + names[:1]  # nobody always runs after the same one
    return took


def median_s(took: list[Took]) -> float:
    return statistics.median(once.cpu_s for once in took)


def ratio(above: list[Took], below: list[Took]) -> float:
    """Median over the rounds, each of which has both sides within a second or so."""
    return statistics.median(a.cpu_s / b.cpu_s for a, b in zip(above, below, strict=True))


class Report:
    """Prints lines and collects missed goals."""

    def __init__(self) -> None:
        self.missed = 0

    def line(self, what: str, value: str, met: bool | None = None, goal: str = "") -> None:
        self.missed += met is False
        verdict = "" if met is None else f"   goal {goal}: {'met' if met else 'MISSED'}"
        print(f"{what:58s} {value:>20s}{verdict}", flush=True)


def speed(dim: int, row_counts: list[int], rounds: int, report: Report) -> None:
    cases = {rows: Case(rows, dim) for rows in row_counts}
    sides: dict[Any, Callable[[], Took]] = {("pass", rows): case.scan for rows, case in cases.items()}
    sides |= {("upload", rows): case.upload for rows, case in cases.items()}
    took = take_turns(sides, rounds)
    for rows, case in cases.items():
        took_s, what = median_s(took["upload", rows]), f"upload, dim {dim}, {rows:.0e} rows"
        of_pass, rate = ratio(took["pass", rows], took["upload", rows]), rows / took_s
        wall = statistics.median(once.wall_s / once.cpu_s for once in took["upload", rows])
        text = f"{rate / 1e6:.1f}e6 rows/s"
        report.line(what, text, rate >= RATE_GOAL if dim == 16 else None, f"{RATE_GOAL / 1e6:.0f}e6")
        met = of_pass >= PASS_GOAL if (dim, rows) == (128, row_counts[-1]) else None
        report.line("  its bytes/s, of those of isfinite", f"{of_pass:.2f}", met, f"{PASS_GOAL:.2f}")
        report.line(
            "  embeddings; time that passed, of CPU time", f"{case.values.nbytes / took_s / 1e9:.1f} GB/s; {wall:.1f}"
        )


def linear(dim: int, row_counts: list[int], rounds: int, report: Report) -> None:
    cases = {rows: Case(rows, dim) for rows in row_counts}
    least, most = row_counts[0], row_counts[-1]
    for kind in ("chunks as dumped", "one chunk"):
        sides: dict[Any, Callable[[], Took]] = {}
        for rows, case in cases.items():
            table = case.table.combine_chunks() if kind == "one chunk" else case.table
            sides[rows] = functools.partial(case.check_and_batch, table)
        took = take_turns(sides, rounds)
        growth = ratio(took[most], took[least]) * least / most
        nanoseconds = ", ".join(f"{median_s(took[rows]) / rows * 1e9:.1f}" for rows in row_counts)
        report.line(f"validate + batch, dim {dim}, {kind}", f"{nanoseconds} ns/row")
        what = f"  time per row, {most:.0e} against {least:.0e}"
        report.line(what, f"{growth:.2f}", growth <= LINEAR_GOAL, f"<= {LINEAR_GOAL:.2f}")


def peak_rss_bytes(reset: bool) -> int:
    """Greatest resident size since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def memory(dim: int, rows: int, batch_size: int, report: Report) -> None:
    case, view = Case(rows, dim), DiscardingView(batch_size)
    what = f"memory, dim {dim}, {rows:.0e} rows, windows of 4 x {batch_size}"

    def upload() -> None:
        uploader.submit(1, case.table)
        uploader.drain()

    with running(dim, view) as uploader:
        upload()  # what is allocated once and kept is no part of an upload
        gc.collect()
        before = peak_rss_bytes(reset=True)
        upload()
        grown = peak_rss_bytes(reset=False) - before
        pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
        POOLS.append(pool)
        pa.set_memory_pool(pool)
        tracemalloc.start()
        base, _ = tracemalloc.get_traced_memory()
        upload()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    batches = uploader._batches(case.table)
    window = sum(batch.nbytes for batch in itertools.islice(batches, view._max_workers))
    allocated = (peak - base + pool.max_memory()) / window
    report.line(f"{what}, allocated", f"{allocated:.2f} windows", allocated < MEMORY_GOAL, f"< {MEMORY_GOAL:.0f}")
    report.line(f"{what}, RSS", f"{grown / window:.2f} windows", grown < MEMORY_GOAL * window, f"< {MEMORY_GOAL:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, at most 1e6 rows: to see that it runs; exit 0"
    )
    parser.add_argument("--rounds", type=int, help="measured rounds, default 9 (--quick: 3)")
    parser.add_argument("--report-only", action="store_true", help="exit 0 even when a goal is missed")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # both threads of the uploader share it
    pa.set_cpu_count(1)
    rounds, report = options.rounds or (3 if options.quick else 9), Report()
    sizes = [10**5, 10**6] if options.quick else [10**5, 10**6, 10**7]
    speed(16, sizes, rounds, report)
    speed(128, sizes[:2], rounds, report)
    linear(16, sizes, rounds, report)
    for dim in (16, 128):
        for batch_size in (1000, 20_000):
            memory(dim, sizes[1], batch_size, report)
    return 1 if report.missed and not options.quick and not options.report_only else 0


if __name__ == "__main__":
    sys.exit(main())

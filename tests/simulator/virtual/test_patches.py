"""Unmodified code in virtual time: the standard library behaves, chance comes from the seed, and nothing leaks out."""

import asyncio
import concurrent.futures
import datetime
import os
import queue
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from time import monotonic as bound_monotonic
from time import sleep as bound_sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.simulator.virtual import patches
from deltaproof.simulator.virtual.scheduler import RandomPolicy, RankClock, Scheduler, SimulationError


def simulate(main: Callable[[], Any], seed: int = 0) -> Any:
    """Run ``main`` as the only rank; returns what it returns, raises what it raises."""
    scheduler = Scheduler(RandomPolicy(seed), [RankClock()])
    result: list[Any] = []
    died: list[Any] = []
    scheduler.thread_died = lambda args: died.append(args.exc_value)
    with patches.installed(scheduler, seed):
        scheduler.spawn(lambda: result.append(main()), "rank0", 0)
        scheduler.run()
        assert scheduler.stuck == "", [(t.name, t.waits_for, t.stack()) for t in scheduler.waiting()]
    if died:
        raise died[0]
    return result[0]


def test_an_hour_takes_no_time() -> None:
    def main() -> tuple[float, ...]:
        before = time.monotonic(), time.time(), bound_monotonic()
        time.sleep(1800)
        bound_sleep(1800)
        return tuple(b - a for a, b in zip(before, (time.monotonic(), time.time(), bound_monotonic()), strict=True))

    began_s = time.perf_counter()
    assert simulate(main) == pytest.approx((3600, 3600, 3600), abs=0.01)
    assert time.perf_counter() - began_s < 600


def test_dates_follow_the_virtual_clock() -> None:
    def main() -> list[Any]:
        first = datetime.datetime.now(datetime.UTC)
        time.sleep(86_400)
        later = datetime.datetime.now(datetime.UTC)
        assert isinstance(later, datetime.datetime)
        assert time.gmtime().tm_mday == 2
        assert datetime.date.fromtimestamp(0).year in (1969, 1970)
        return [first.year, round((later - first).total_seconds()), time.strftime("%Y", time.gmtime(0))]

    assert simulate(main) == [2026, 86_400, "1970"]


def chances() -> list[Any]:
    return [
        os.urandom(8),
        uuid.uuid4().hex,
        uuid.uuid1().hex,
        secrets.token_hex(4),
        random.random(),
        random.Random().random(),
        random.SystemRandom().random(),
        float(np.random.default_rng().random()),
    ]


def test_chance_comes_from_the_seed() -> None:
    first = simulate(chances, 1)
    assert simulate(chances, 1) == first
    for mine, others in zip(simulate(chances, 2), first, strict=True):
        assert mine != others or isinstance(mine, str)  # uuid1 is time and a fixed node
    assert chances() != chances()


def test_chance_outside_goes_on_as_if_nothing_had_been() -> None:
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    seen = [random.random()]
    simulate(chances)
    assert [*seen, random.random(), random.random()] == expected


def test_everything_is_put_back_also_after_an_error() -> None:
    watched = [(owner, name) for owner, name, _ in patches._REPLACED] + [(o, n) for o, n, _ in patches._FRESH]
    before = [vars(owner).get(name) for owner, name in watched]
    threads = set(threading.enumerate())

    def main() -> None:
        threading.Thread(target=time.sleep, args=(1e9,), daemon=True).start()
        time.sleep(1)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        simulate(main)
    assert [vars(owner).get(name) for owner, name in watched] == before
    assert set(threading.enumerate()) == threads
    assert threading.current_thread().name != "rank0"
    assert sleep_is_real()


def sleep_is_real() -> bool:
    return time.sleep is patches._real.sleep and bound_sleep is patches._real.sleep


def test_other_threads_of_the_process_see_the_real_world() -> None:
    asked: queue.Queue[Any] = queue.Queue()
    answered: queue.Queue[Any] = queue.Queue()

    def outsider() -> None:
        asked.get(timeout=60)
        answered.put((time.time(), threading.get_ident(), type(threading.Lock()), type(threading.Event())))

    real = threading.Thread(target=outsider)
    real.start()
    kind, event = type(threading.Lock()), threading.Event

    def main() -> Any:
        asked.put(True)
        patches._real.sleep(0)
        real_answer = answered.get(timeout=60)
        return real_answer, time.time()

    # The queues were made outside, so a simulated rank's use of them is real, too.
    (wall_s, ident, lock, _), virtual_s = simulate(main)
    real.join(60)
    assert wall_s > 1_767_225_600 + 86_400 or abs(wall_s - time.time()) < 3600
    assert abs(virtual_s - 1_767_225_600) < 3600
    assert ident == real.ident
    assert lock is kind
    assert threading.Event is event


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: socket.create_connection(("127.0.0.1", 9)), "socket"),
        (lambda: socket.socket(), "socket"),
        (lambda: subprocess.run([sys.executable, "-c", ""]), "subprocess.Popen"),
        (os.fork, "os.fork"),
        (lambda: os.system("true"), "os.system"),
        (lambda: os.kill(os.getpid(), 0), "os.kill"),
    ],
)
def test_what_cannot_be_simulated_says_so(call, name: str) -> None:
    with pytest.raises(SimulationError, match=f"{name}.*cannot be simulated.*rank0.*use|reach"):
        simulate(call)


def test_runs_cannot_be_nested() -> None:
    with pytest.raises(SimulationError, match="under way already"):
        simulate(lambda: simulate(lambda: None))
    assert simulate(lambda: 1) == 1


# -- the standard library on top ---------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(0, 3), st.integers(0, 2**32))
def test_a_bounded_queue_loses_and_invents_nothing(makers: int, takers: int, items: int, room: int, seed: int) -> None:
    def main() -> list[Any]:
        work: queue.Queue[Any] = queue.Queue(room)
        taken: list[Any] = []

        def make(number: int) -> None:
            for index in range(items):
                work.put((number, index))
                time.sleep(0.001)

        def take() -> None:
            while (item := work.get()) is not None:
                taken.append(item)
                work.task_done()

        threads = [threading.Thread(target=make, args=(n,)) for n in range(makers)]
        ends = [threading.Thread(target=take) for _ in range(takers)]
        for thread in threads + ends:
            thread.start()
        for thread in threads:
            thread.join()
        work.join()
        for _ in ends:
            work.put(None)
        for thread in ends:
            thread.join()
        return taken

    taken = simulate(main, seed)
    assert sorted(taken) == [(n, i) for n in range(makers) for i in range(items)]
    assert simulate(main, seed) == taken


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_semaphores_locks_and_barriers_keep_their_word(permits: int, threads: int, seed: int) -> None:
    def main() -> tuple[int, int, list[int]]:
        room, lock, meet = threading.BoundedSemaphore(permits), threading.RLock(), threading.Barrier(threads)
        inside, most, total, arrived = [0], [0], [0], []

        def run() -> None:
            with room:
                with lock, lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    total[0] += 1
                time.sleep(0.5)
                with lock:
                    inside[0] -= 1
            arrived.append(meet.wait())

        made = [threading.Thread(target=run) for _ in range(threads)]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
        with pytest.raises(ValueError, match="too many"):
            room.release()
        return most[0], total[0], sorted(arrived)

    assert simulate(main, seed) == (min(permits, threads), threads, list(range(threads)))


@given(st.floats(0.01, 5), st.floats(0.01, 5), st.integers(0, 2**32))
def test_time_outs_fire_when_nothing_came_first(timeout_s: float, delay_s: float, seed: int) -> None:
    def main() -> list[bool]:
        event, changed, lock, flag = threading.Event(), threading.Condition(), threading.Lock(), []
        held = threading.Event()

        def later() -> None:
            with lock:
                held.set()
                time.sleep(delay_s)
            event.set()
            with changed:
                flag.append(1)
                changed.notify_all()

        threading.Thread(target=later).start()
        held.wait()
        began_s = time.monotonic()

        def left_s() -> float:
            return max(0.0, timeout_s - (time.monotonic() - began_s))

        got = [lock.acquire(timeout=left_s()), event.wait(left_s())]
        with changed:
            got.append(bool(changed.wait_for(lambda: flag, left_s())))
        return got

    got = simulate(main, seed)
    if abs(delay_s - timeout_s) > 0.03:  # a warp may let a timer win that is a little late
        assert got == [delay_s < timeout_s] * 3


def test_pools_timers_and_thread_locals() -> None:
    def main() -> list[Any]:
        local = threading.local()
        fired: list[float] = []

        def work(number: int) -> int:
            local.number = number
            time.sleep(1)
            return local.number

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, range(8)))
            done, late = concurrent.futures.wait([pool.submit(time.sleep, s) for s in (1, 9)], timeout=5)
        timer = threading.Timer(30, lambda: fired.append(time.monotonic()))
        began_s = time.monotonic()
        timer.start()
        timer.join()
        return [results, len(done), len(late), round(fired[0] - began_s), hasattr(local, "number")]

    assert simulate(main) == [list(range(8)), 1, 1, 30, False]


def test_a_rank_killed_amid_a_submit_keeps_no_other_rank_from_its_pools() -> None:
    scheduler = Scheduler(RandomPolicy(0), [RankClock(), RankClock()])
    done: list[int] = []

    def killed() -> None:
        with concurrent.futures.thread._global_shutdown_lock:
            time.sleep(1)
            scheduler.kill(0)

    def goes_on() -> None:
        time.sleep(2)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done.append(pool.submit(lambda: 7).result())

    with patches.installed(scheduler, 0):
        scheduler.spawn(killed, "rank0", 0)
        scheduler.spawn(goes_on, "rank1", 1)
        scheduler.run()
        assert [task.rank for task in scheduler.waiting()] == []
    assert done == [7]


def test_asyncio_runs_on_virtual_time() -> None:
    async def main() -> tuple[int, list[int]]:
        began_s = asyncio.get_running_loop().time()
        found = await asyncio.gather(*[asyncio.sleep(n, n) for n in (3, 1, 2)])
        await asyncio.to_thread(time.sleep, 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 10)
        return round(asyncio.get_running_loop().time() - began_s), found

    assert simulate(lambda: asyncio.run(main())) == (18, [3, 1, 2])


def test_two_loops_in_two_threads_do_not_meet() -> None:
    async def ticks(name: str, seen: list[str]) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(name)

    def main() -> list[str]:
        seen: list[str] = []
        threads = [threading.Thread(target=lambda n=n: asyncio.run(ticks(n, seen))) for n in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(seen)

    assert simulate(main) == ["a", "a", "a", "b", "b", "b"]


def test_a_thread_that_dies_is_noticed() -> None:
    def main() -> None:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    with pytest.raises(ZeroDivisionError):
        simulate(main)

"""What the simulator adds around a target inside one rank: named points, and a client that reports its calls.

The proxies pass every attribute on, so a target sees the ``feature_store_py`` interface unchanged.
"""

from __future__ import annotations

import _thread
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .faults import InjectedFault, LeakyError, RankKill, RankRaise, RankStall
from .scenario import Scenario

#: What a write takes behind its rows, in the SDK's order.
WRITE_ARGUMENTS = ("version", "write_mode", "ts")


class Recorder(Protocol):
    """Where a rank's events go; thread-safe."""

    def write(self, kind: str, *, step: int | None = None, **data: Any) -> None: ...


class Points:
    """Counts a rank's passages of the named points and strikes the faults planned there; thread-safe.

    ``die`` ends the rank's process as SIGKILL does, ``stall`` lets it stand still for so many seconds. ``secrets``: by
    name, what a planned error of the client lets slip.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        events: Recorder,
        die: Callable[[], None],
        secrets: Mapping[str, str] | None = None,
        attempt: int = 0,
        stall: Callable[[float], None] = time.sleep,
    ) -> None:
        self._planned: dict[tuple[str, int], tuple[int, RankRaise | RankKill | RankStall | LeakyError]] = {
            ("sdk.flushed" if isinstance(f, LeakyError) else f.point, f.nth): (index, f)
            for index, f in enumerate(scenario.faults)
            if isinstance(f, RankRaise | RankKill | RankStall | LeakyError)
            and (f.rank, getattr(f, "attempt", attempt)) == (rank, attempt)
        }
        self._rank, self._events, self._die, self._stall = rank, events, die, stall
        self._secrets = dict(secrets or {})
        self.views = itertools.count()
        self._passed: Counter[str] = Counter()
        self._lock = _thread.allocate_lock()  # not threading.Lock, which the virtual engine replaces

    def passing(self, point: str) -> None:
        """Call where the point is. Raises, or ends the process, when a fault is planned for this passage."""
        with self._lock:
            self._passed[point] += 1
            nth = self._passed[point]
        if (point, nth) in self._planned:
            index, fault = self._planned[point, nth]
            self.fired(index, point=point, nth=nth)
            if isinstance(fault, RankKill):
                self._die()
            if isinstance(fault, RankStall):
                self._stall(fault.seconds)
                return
            if isinstance(fault, LeakyError):
                said = "&".join(f"{name}={value}" for name, value in self._secrets.items())
                raise ConnectionError(
                    f"HTTPSConnectionPool(host='store'): Max retries exceeded with url: /write?{said}"
                )
            raise InjectedFault(f"injected by the scenario: rank {self._rank} raises at {point}, passage {nth}")

    def fired(self, index: int, **data: Any) -> None:
        """Record that planned fault ``index`` struck."""
        self._events.write("fault", index=index, **data)


class _Observed:
    def __init__(self, inner: Any, points: Points, events: Recorder) -> None:
        self._inner, self._points, self._events = inner, points, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _wrap(self, cls: type[_Observed], inner: Any) -> Any:
        return None if inner is None else cls(inner, self._points, self._events)


class ObservedView(_Observed):
    """Reports each write and flush, then passes it on.

    In the events, ``view`` tells the views of one rank apart and ``number`` counts a view's writes from 1; a flush
    ``covers`` the writes up to that number: those that were begun when it was called.
    """

    def __init__(self, inner: Any, points: Points, events: Recorder) -> None:
        super().__init__(inner, points, events)
        self._view, self._writes = next(points.views), itertools.count(1)
        self._written = 0

    def write_features(self, *args: Any, **kwargs: Any) -> Any:
        told = {**dict(zip(("data", *WRITE_ARGUMENTS), args, strict=False)), **kwargs}
        self._record("json", len(told.get("data", ())), told)
        return self._inner.write_features(*args, **kwargs)

    def write_features_arrow(self, *args: Any, **kwargs: Any) -> Any:
        told = {**dict(zip(("batch", *WRITE_ARGUMENTS), args, strict=False)), **kwargs}
        self._record("arrow", getattr(told.get("batch"), "num_rows", None), told)
        return self._inner.write_features_arrow(*args, **kwargs)

    def write_flush(self) -> Any:
        self._points.passing("sdk.flush")
        covers = self._written
        summary = self._inner.write_flush()
        plain: dict[str, Any] = {k: [str(e) for e in v] if k == "errors" else v for k, v in summary.items()}
        self._events.write("sdk-flush", view=self._view, covers=covers, **plain)
        self._points.passing("sdk.flushed")
        return summary

    def _record(self, how: str, rows: int | None, told: dict[str, Any]) -> None:
        self._written = number = next(self._writes)
        where = {name: told.get(name) for name in ("version", "ts")}
        self._events.write("sdk-write", view=self._view, number=number, how=how, rows=rows, **where)
        self._points.passing("sdk.write")


class ObservedProject(_Observed):
    """Hands out observed views."""

    def get_dynamic_embedding_feature_view(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(ObservedView, self._inner.get_dynamic_embedding_feature_view(*args, **kwargs))

    def create_dynamic_embedding_feature_view(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(ObservedView, self._inner.create_dynamic_embedding_feature_view(*args, **kwargs))


class ObservedClient(_Observed):
    """A Feature Store client whose views report ``sdk-write`` and ``sdk-flush`` events and pass the ``sdk.*``
    points."""

    def get_project(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(ObservedProject, self._inner.get_project(*args, **kwargs))

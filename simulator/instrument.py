"""What the simulator adds around a target inside one rank: named points, and a client that reports its calls.

The proxies pass every attribute on, so a target sees the ``feature_store_py`` interface unchanged.
"""

from __future__ import annotations

import _thread
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from .faults import InjectedFault, RankKill, RankRaise
from .scenario import Scenario


class Recorder(Protocol):
    """Where a rank's events go; thread-safe."""

    def write(self, kind: str, *, step: int | None = None, **data: Any) -> None: ...


class Points:
    """Counts a rank's passages of the named points and strikes the faults planned there; thread-safe.

    ``die`` ends the rank's process as SIGKILL does.
    """

    def __init__(self, scenario: Scenario, rank: int, events: Recorder, die: Callable[[], None]) -> None:
        self._planned = {
            (f.point, f.nth): (index, f)
            for index, f in enumerate(scenario.faults)
            if isinstance(f, RankRaise | RankKill) and f.rank == rank
        }
        self._rank, self._events, self._die = rank, events, die
        self._passed: Counter[str] = Counter()
        self._lock = _thread.allocate_lock()  # not threading.Lock, which the virtual engine replaces

    def passing(self, point: str) -> None:
        """Call where the point is. Raises InjectedFault, or ends the process, when a fault is planned for this
        passage."""
        with self._lock:
            self._passed[point] += 1
            nth = self._passed[point]
        if (point, nth) in self._planned:
            index, fault = self._planned[point, nth]
            self.fired(index, point=point, nth=nth)
            if isinstance(fault, RankKill):
                self._die()
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
    """Reports each write and flush, then passes it on."""

    def write_features(self, *args: Any, **kwargs: Any) -> Any:
        data = kwargs.get("data", args[0] if args else ())
        self._record("json", len(data), kwargs)
        return self._inner.write_features(*args, **kwargs)

    def write_features_arrow(self, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get("batch", args[0] if args else None)
        self._record("arrow", getattr(batch, "num_rows", None), kwargs)
        return self._inner.write_features_arrow(*args, **kwargs)

    def write_flush(self) -> Any:
        self._points.passing("sdk.flush")
        summary = self._inner.write_flush()
        plain: dict[str, Any] = {k: [str(e) for e in v] if k == "errors" else v for k, v in summary.items()}
        self._events.write("sdk-flush", step=None, **plain)
        return summary

    def _record(self, how: str, rows: int | None, kwargs: dict[str, Any]) -> None:
        self._events.write("sdk-write", how=how, rows=rows, version=kwargs.get("version"), ts=kwargs.get("ts"))
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

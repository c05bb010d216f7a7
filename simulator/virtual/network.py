"""The way from a rank to the store, in virtual time: latency, and requests that outlive the rank that sent them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final

from ...fakes.feature_store_py.transport import StoreTransport, TransportError
from ...fakes.server.faults import FaultPlan, Strike
from ...fakes.store import Store, ViewSpec
from .scheduler import Scheduler

#: One way, in seconds: uniform in this interval.
LATENCY_S: Final = (0.0002, 0.002)
#: The chance that a request which was on its way when its rank was killed still reaches the store.
ARRIVES: Final = 0.5
Told = Callable[..., None]


class VirtualTransport(StoreTransport):
    """`StoreTransport` whose requests take time, and are told to ``told`` with their fate (history event `request`)."""

    def __init__(
        self, scheduler: Scheduler, store: Store, username: str, plan: FaultPlan, chance: random.Random, told: Told
    ) -> None:
        self._scheduler, self._chance, self._told = scheduler, chance, told
        super().__init__(store, username, plan)

    def refresh(self) -> None:
        """Learn the current token, from the control plane: a request as any other."""
        self._call("list_datasources", "control", lambda strike, store: super(VirtualTransport, self).refresh())

    def _call(
        self, route: str, group: str, effect: Callable[[Strike, Store], Any], view: ViewSpec | None = None
    ) -> Any:
        task = self._scheduler.current
        assert task is not None
        if group == "write" and self._chance.random() < ARRIVES:
            task.in_flight = lambda: self._orphan(route, group, effect, view)
        time.sleep(self._chance.uniform(*LATENCY_S))
        task.in_flight = None
        try:
            result = super()._call(route, group, effect, view)
        except TransportError as error:
            self._told(route, self._username, status=error.status, code=error.code, fate=error.applied)
            raise
        if group == "write":
            self._told(route, self._username, status=200, fate="yes")
        time.sleep(self._chance.uniform(*LATENCY_S))
        return result

    def _orphan(self, route: str, group: str, effect: Callable[[Strike, Store], Any], view: ViewSpec | None) -> None:
        """The request arrives; nobody waits for the reply."""
        time.sleep(self._chance.uniform(*LATENCY_S))
        try:
            super()._call(route, group, effect, view)
        except TransportError as error:
            self._told(route, self._username, status=error.status, code=error.code, fate=error.applied)
        else:
            self._told(route, self._username, status=200, fate="yes")

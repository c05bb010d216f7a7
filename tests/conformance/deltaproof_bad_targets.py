"""Targets with something wrong with them, named by tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from deltaproof.conformance.target import RankContext, Uploader, claims
from deltaproof.conformance.templates.uploader import Adapter


class HangsInStart(Adapter):
    def start(self) -> None:
        threading.Event().wait()


class LeaksThread(Adapter):
    def start(self) -> None:
        super().start()
        threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()


def raises(context: RankContext) -> Uploader:
    raise ValueError("no configuration file")


def returns_none(context: RankContext) -> None: ...


def takes_two(context: RankContext, path: str) -> Uploader:
    raise AssertionError


def lacks_close(context: RankContext) -> Any:
    class Product:
        def start(self) -> None: ...
        def submit(self, step: int, table: pa.Table) -> None: ...
        def check_error(self) -> None: ...

    return Product()


class SubmitTakesOne(Adapter):
    def submit(self, table: pa.Table) -> None: ...  # type: ignore[override]


class LacksFinish:
    def __init__(self, context: RankContext) -> None: ...
    def start(self) -> None: ...
    def after_step(self, step: int) -> None: ...
    def close(self) -> None: ...


class LacksRestart(LacksFinish):
    def paused(self) -> Any: ...
    def finish(self, step: int) -> None: ...


@claims("feature-store", "arow")
class ClaimsNonsense(Adapter): ...


@claims("json")
class InMemory:
    """A store of its own: a dictionary that the ranks share."""

    def __init__(self, context: RankContext) -> None:
        assert context.shared is not None
        self.rows: dict[tuple[str, int], Any] = context.shared.setdefault("rows", {})
        self.names = context.names

    def start(self) -> None: ...

    def submit(self, step: int, table: pa.Table) -> None:
        for row in table.to_pylist():
            self.keep(self.names[row["table_fqn"]], row["key_id"], row["embedding"])

    def keep(self, name: str, key: int, values: Any) -> None:
        self.rows[name, key] = values

    def check_error(self) -> None: ...

    def close(self, drain: bool) -> None: ...

    @staticmethod
    def contents(context: RankContext) -> Iterator[tuple[str, int, Any]]:
        assert context.shared is not None
        return ((name, key, values) for (name, key), values in context.shared.get("rows", {}).items())


class LosesZero(InMemory):
    def keep(self, name: str, key: int, values: Any) -> None:
        if key:
            super().keep(name, key, values)


class KeepsFirst(InMemory):
    def keep(self, name: str, key: int, values: Any) -> None:
        self.rows.setdefault((name, key), values)


class Halves(InMemory):
    def keep(self, name: str, key: int, values: Any) -> None:
        super().keep(name, key, np.array(values) / 2)


class CannotTell(InMemory):
    @staticmethod
    def contents(context: RankContext) -> Any:
        return [("name", 1)]

"""A report as plain data: what ``report.json`` holds, and what every other form of a report is made from.

``schema()`` is its JSON schema. A file of another ``format`` than ``FORMAT`` is another schema's.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

#: The format of report files that this package writes.
FORMAT = 1

VerdictName = Literal["held", "broken", "not exercised", "not tested", "kit error"]


class _Data(msgspec.Struct, kw_only=True):
    pass


class FaultReport(_Data):
    """A planned fault: its kind, its family, all of it in one line, and how often it struck."""

    kind: str
    family: str
    text: str
    fired: int


class RankReport(_Data):
    """How a rank ended in the last attempt: `simulator.history.RankOutcome`."""

    rank: int
    status: str
    exitcode: int | None
    error: str


class Moment(_Data):
    """One line of a row's life: when (ms since the run began; None: not known), on which lane, what.

    ``kind``: ``model`` (what the model held), ``store`` (what the store accepted or serves), ``missing`` (what should
    have come and did not), ``trouble`` (a fault or an error that struck meanwhile).
    """

    t_ms: float | None
    lane: str
    kind: Literal["model", "store", "missing", "trouble"]
    text: str


class ViolationReport(_Data):
    """A broken rule: the fields of `verdict.Violation`, ``text`` as a terminal shows it, and the ``story`` of the row.

    Rows are lists of float32 (a NaN is a text), a text or null for nothing. ``key`` is any int64.
    """

    message: str
    table: str | None = None
    name: str | None = None
    key: int | None = None
    rank: int | None = None
    step: int | None = None
    ts: int | None = None
    expected: Any = None
    found: Any = None
    events: list[dict[str, Any]] = []
    text: list[str] = []
    story: list[Moment] = []


class Diagnosis(_Data):
    """Something wrong with the target itself (`diagnosis.DIAGNOSES`): what it means, what was seen first, in how many
    runs."""

    name: str
    meaning: str
    seen: str
    runs: int = 1


class FindingReport(_Data):
    """What one property said of one run: `verdict.Finding`."""

    property: str
    verdict: VerdictName
    checked: int
    unit: str
    reason: str
    violations_total: int
    violations: list[ViolationReport]


class RunReport(_Data):
    """One scenario of a suite. ``families`` of its faults; ``reason``: why the verdict is not simply *held*.

    Without ``findings`` it was not judged: the target or the engine lacks something, or the kit failed.
    """

    name: str
    seed: int
    families: list[str]
    scenario: dict[str, Any]
    target: str
    engine: str
    verdict: VerdictName
    reason: str = ""
    expected: str = ""
    outcome: str = ""
    succeeded: bool = False
    rows_compared: int = 0
    faults: list[FaultReport] = []
    ranks: list[RankReport] = []
    findings: list[FindingReport] = []
    diagnoses: list[Diagnosis] = []
    wall_s: float = 0.0

    def finding(self, property: str) -> FindingReport | None:
        """What the named property said of this run."""
        return next((f for f in self.findings if f.property == property), None)


class Mark(_Data):
    """One event on a timeline, ``t_ms`` since the run began. ``about``: it carried the row that a violation names."""

    t_ms: float
    lane: str
    kind: str
    text: str
    about: bool = False


class Timeline(_Data):
    """What happened, by lane (each rank, the store, the supervisor). ``left_out``: marks that were too many to show."""

    lanes: list[str]
    marks: list[Mark]
    left_out: int = 0


class Failure(_Data):
    """A property that broke: the smallest run found that breaks it, and the names of the other runs that do.

    ``in_words``: the scenario, in sentences. ``file``: the failure file; ``replay``: the command that repeats it.
    """

    property: str
    run: RunReport
    in_words: list[str]
    timeline: Timeline
    shrunk_from: str
    shrink_runs: int = 0
    also: list[str] = []
    file: str = ""
    replay: str = ""


class Cell(_Data):
    """A property under the faults of one family: the verdict, and how many runs came to which."""

    property: str
    family: str
    verdict: VerdictName
    held: int = 0
    broken: int = 0
    not_exercised: int = 0
    not_tested: int = 0
    kit_errors: int = 0
    reason: str = ""


class PropertyReport(_Data):
    """A rule: its name, the rule in one sentence, and why it exists."""

    name: str
    rule: str
    why: str


class Document(_Data):
    """The report of one suite. ``began``: UTC; ``repeat``: the command that runs all of it again."""

    format: int = FORMAT
    kit: str = ""
    target: str = ""
    engine: str = ""
    profile: str = ""
    seed: int = 0
    verdict: VerdictName = "not exercised"
    began: str = ""
    wall_s: float = 0.0
    repeat: str = ""
    properties: list[PropertyReport] = []
    families: list[str] = []
    diagnoses: list[Diagnosis] = []
    cells: list[Cell] = []
    failures: list[Failure] = []
    runs: list[RunReport] = []

    def cell(self, property: str, family: str) -> Cell:
        """The cell of one property and family; KeyError when there is none."""
        for cell in self.cells:
            if (cell.property, cell.family) == (property, family):
                return cell
        raise KeyError((property, family))


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a report file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Document)}


def to_json(document: Document) -> str:
    """The report file's text. JSON has no NaN: properties write such numbers as texts."""
    return json.dumps(msgspec.to_builtins(document, enc_hook=str), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str | bytes) -> Document:
    """Raises msgspec.ValidationError for anything else than a report of this format."""
    document = msgspec.json.decode(text, type=Document)
    if document.format != FORMAT:
        raise msgspec.ValidationError(f"report format {document.format}; this deltaproof reads {FORMAT}")
    return document

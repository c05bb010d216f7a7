"""Suites of runs: which verdict each cell gets, how failures are made small, and what each form of a report says."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from deltaproof.conformance.check import check, load
from deltaproof.conformance.judge import judge
from deltaproof.conformance.properties import PROPERTIES
from deltaproof.conformance.report import document as report_document
from deltaproof.conformance.report.document import Document, Failure, RunReport, from_json, schema, to_json
from deltaproof.conformance.report.files import write
from deltaproof.conformance.report.html import draw, elements, to_html
from deltaproof.conformance.report.junit import to_junit
from deltaproof.conformance.report.terminal import print_report
from deltaproof.conformance.report.timeline import MARKS_MAX, STORY_MAX, story, timeline
from deltaproof.conformance.report.words import in_words
from deltaproof.conformance.shrink import breaks, shrink
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.suite import CALM, FAMILIES, REPORTS_KEPT, Run, Suite, describe, families, run_one
from deltaproof.conformance.verdict import Report, Verdict, Violation
from deltaproof.simulator import faults
from deltaproof.simulator.errors import KitError, ScenarioError
from deltaproof.simulator.history import Event, History, RankOutcome
from deltaproof.simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from deltaproof.simulator.virtual.engine import VirtualEngine

from .browser import chromium, find_chromium
from .histories import Model, rows_of, with_writes

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = "specimen:S08"
PLAIN = Scenario(name="plain", workload=Workload(steps=4))
PLAN = [
    PLAIN,
    msgspec.structs.replace(PLAIN, name="refused", faults=(faults.StoreError(rank=1, status=403),)),
    msgspec.structs.replace(
        PLAIN,
        name="refused-and-a-jump",
        faults=(faults.StoreError(status=403, skip=1), faults.ClockJump(rank=0, step=2, seconds=-60.0)),
    ),
    msgspec.structs.replace(PLAIN, name="never-struck", faults=(faults.ClockJump(rank=0, step=9, seconds=-60.0),)),
    msgspec.structs.replace(PLAIN, name="not-asked", faults=(faults.DiskError(rank=0),)),
]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A suite of a known bug that loses rows without a word, with a failure that was made small."""
    found = Suite(TARGET, "virtual", "smoke", 0, PLAN, repeat="deltaproof conform specimen:S08")
    engine = VirtualEngine()
    for scenario in PLAN:
        missing = "the target keeps no shards" if scenario.name == "not-asked" else None
        found.add(run_one(engine, scenario, TARGET, missing, "virtual"))
    found.explain(lambda s: check(engine, s, TARGET), tmp_path_factory.mktemp("failures"), 20.0)
    return found


@pytest.fixture(scope="module")
def document(suite: Suite) -> Document:
    return suite.document()


# ---------------------------------------------------------------------------------------------------------- verdicts
def told(name: str = "a", verdict: str = "held", **broken: str) -> RunReport:
    """A run of which all properties held but those that are given."""
    run = describe(judge(Model(msgspec.structs.replace(PLAIN, name=name)).run()))
    run.verdict, run.reason = verdict, "a reason"  # type: ignore[assignment]
    for finding in run.findings:
        finding.verdict = broken.get(finding.property.replace("-", "_"), finding.verdict)  # type: ignore[assignment]
    return run


def with_runs(*runs: RunReport) -> Suite:
    suite = Suite("t", "virtual", "smoke", 0, [msgspec.structs.replace(PLAIN, name=run.name) for run in runs])
    suite.merge(runs, [])
    return suite


def test_the_cells_of_a_suite(document: Document) -> None:
    assert document.families == [CALM, "clock", "store", "disk"]
    cells = {(c.property, c.family): c for c in document.cells}
    assert len(cells) == len(document.cells) == 4 * len(PROPERTIES)
    lost = cells["no-silent-loss", "store"]
    assert (lost.verdict, lost.broken, lost.held) == ("broken", 2, 0)
    assert cells["no-silent-loss", CALM].verdict == "held"
    # Of the two runs with a jump, one holds and in the other it never struck.
    jump = cells["terminates", "clock"]
    assert (jump.verdict, jump.held, jump.not_exercised) == ("held", 1, 1)
    disk = cells["no-lost-rows", "disk"]
    assert (disk.verdict, disk.reason, disk.not_tested) == ("not tested", "the target keeps no shards", 1)
    assert document.verdict == "broken"


def test_what_was_not_judged_is_never_held() -> None:
    runs = [told("a", "not exercised"), told("b", "kit error"), told("c", "not tested")]
    for run in runs[1:]:
        run.findings = []
    for run, verdict in zip(runs, ("not exercised", "kit error", "not tested"), strict=True):
        suite = with_runs(run)
        assert suite.verdict == verdict
        assert {c.verdict for c in suite.document().cells} == {verdict}
    assert with_runs().verdict == "not exercised"
    # One run that holds shows that something does; a kit error leaves everything open.
    assert with_runs(told("h"), runs[0]).verdict == "held"
    assert with_runs(told("h"), runs[1]).cell("terminates", CALM).verdict == "kit error"
    assert with_runs(told("h"), told("i", "broken", terminates="broken")).cell("terminates", CALM).verdict == "broken"


def test_a_run_that_was_planned_and_not_run_is_not_tested() -> None:
    suite = Suite("t", "virtual", "smoke", 0, [PLAIN])
    cell = suite.cell("terminates", CALM)
    assert (cell.verdict, cell.not_tested, cell.reason) == ("not tested", 1, "not run: it was not selected")
    assert suite.cell("terminates", "disk").reason == "the profile has no scenario with such a fault"


def test_a_broken_run_holds_nothing_under_a_fault_that_never_struck() -> None:
    run = told("a", "broken", no_lost_rows="broken")
    run.faults = [report_document.FaultReport(kind="clock-jump", family="clock", text="clock-jump(…)", fired=0)]
    suite = with_runs(run)
    assert suite.cell("no-lost-rows", CALM).verdict == "broken"
    cell = suite.cell("terminates", CALM)
    assert (cell.verdict, cell.reason) == ("not exercised", "never struck: clock-jump(…)")


class Failing:
    """An engine that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, scenario: Scenario, target: str = "reference") -> History:
        raise self.error


def test_what_the_kit_gets_wrong_is_a_kit_error_and_bad_input_is_neither() -> None:
    for error in (KitError("the store could not start"), ZeroDivisionError("a property divides")):
        run = run_one(Failing(error), PLAIN, "reference")
        assert (run.told.verdict, run.report) == ("kit error", None)
        assert str(error) in run.told.reason
    with pytest.raises(ScenarioError, match="no such target"):
        run_one(Failing(ScenarioError("no such target")), PLAIN, "reference")


def test_families_of_a_scenario() -> None:
    assert families(PLAIN) == (CALM,)
    assert families(msgspec.structs.replace(PLAIN, restarts=(Restart(),))) == ("restart",)
    both = (faults.StoreError(), faults.ClockOffset(rank=0, seconds=1.0), faults.StoreReset())
    assert families(msgspec.structs.replace(PLAIN, faults=both)) == ("clock", "store")
    assert {cls.family for cls in faults.REGISTRY.values()} < set(FAMILIES)


def test_two_halves_of_a_suite_make_the_whole(document: Document) -> None:
    whole = Suite(TARGET, "virtual", "smoke", 0, PLAN)
    half = from_json(to_json(document))
    whole.merge(half.runs[:3], half.failures)
    whole.merge(half.runs[1:], half.failures)
    merged = whole.document()
    assert merged.cells == document.cells
    assert [f.run.name for f in merged.failures] == [f.run.name for f in document.failures]


class Raising:
    """An engine whose target cannot be made; it counts how often it was asked."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, scenario: Scenario, target: str = "reference") -> History:
        self.runs += 1
        history = Model(scenario).run()
        outcomes = [RankOutcome(o.rank, "error", 1, "TypeError: no", where="factory") for o in history.outcomes]
        return dataclasses.replace(history, outcomes=outcomes)


def test_a_target_that_cannot_be_started_is_asked_once() -> None:
    engine, suite = Raising(), Suite("t", "virtual", "smoke", 0, [PLAIN, msgspec.structs.replace(PLAIN, name="other")])
    for scenario in suite.scenarios:
        suite.ask(engine, scenario)
    assert engine.runs == 1
    assert [run.verdict for run in suite.runs.values()] == ["broken", "not tested"]
    assert suite.runs["other"].reason == "not asked: the target factory-raises"
    assert "factory-raises" in to_html(suite.document())
    assert 'name="factory-raises"' in to_junit(suite.document())
    out = io.StringIO()
    print_report(suite.document(), Console(file=out, width=150))
    assert "factory-raises (in 1 runs): rank 0: TypeError: no" in out.getvalue()


def test_of_many_failures_few_are_kept_and_all_are_counted() -> None:
    plan = [msgspec.structs.replace(PLAIN, name=f"{n}", seed=n) for n in range(20)]
    suite = Suite("t", "virtual", "nightly", 0, plan)
    for scenario in plan:
        report = judgement(scenario, True)
        suite.add(Run(scenario, describe(report), report))
    whole = [run for run in suite.runs.values() if run.findings[0].violations[0].events]
    assert len(whole) == REPORTS_KEPT
    assert suite.cell("terminates", CALM).broken == 20
    suite.explain(lambda scenario: None, None, 1.0)
    [failure] = suite.failures
    assert {failure.shrunk_from, *failure.also} == {scenario.name for scenario in plan}


# ---------------------------------------------------------------------------------------------------------- failures
def test_a_failure_is_small_and_can_be_repeated(suite: Suite, document: Document) -> None:
    silent = [f for f in document.failures if f.property == "no-silent-loss"]
    [failure] = silent
    assert [fault.kind for fault in failure.run.faults] == ["store-error"]
    assert failure.also == ["refused-and-a-jump"], "the same bug under one more fault needs no page of its own"
    smallest = load(Path(failure.file))
    assert smallest.scenario.world_size <= 2
    assert smallest.scenario.workload.steps == 1
    assert f"deltaproof replay {failure.file} --engine virtual" == failure.replay
    again = check(VirtualEngine(), smallest.scenario, smallest.target)
    assert breaks(again, "no-silent-loss")


def test_shrinking_keeps_what_the_failure_needs() -> None:
    """A scenario full of things, of which the failure needs two ranks, six steps and one fault."""
    full = Scenario(
        name="full",
        world_size=4,
        tables=(Table(name="item", rows=40, dim=8), Table(name="user", rows=40, sharding="table_wise", rank=3)),
        workload=Workload(steps=10, eval_every_steps=2, batch_size=8, checkpoint_every_steps=2),
        publisher=PublisherConfig(every_steps=2, upload_format="json", max_workers=3),
        faults=(
            faults.StoreSlow(),
            faults.ClockJump(rank=2, step=7, seconds=-5.0),
            faults.QuietTable(table="user", step=4),
        ),
        restarts=(Restart(world_size=2),),
    ).checked()
    tried: list[Scenario] = []

    def judged(scenario: Scenario) -> Report:
        tried.append(scenario.checked())
        fails = scenario.world_size >= 2 and scenario.workload.steps >= 6
        fails = fails and any(fault.kind == "clock-jump" for fault in scenario.faults)
        return judgement(scenario, fails)

    found = shrink(judged, judgement(full, True), "terminates", 60.0)
    smallest = found.report.history.scenario
    assert found.runs == len(tried)
    assert (smallest.world_size, smallest.workload, smallest.restarts) == (2, Workload(steps=6, batch_size=1), ())
    assert [fault.kind for fault in smallest.faults] == ["clock-jump"]
    assert smallest.publisher == PublisherConfig()
    assert [(t.rows, t.dim) for t in smallest.tables] == [(8, 4)]


def judgement(scenario: Scenario, fails: bool, fired: int = 1) -> Report:
    history = dataclasses.replace(Model(PLAIN).run(), scenario=scenario, fired=[fired] * len(scenario.faults))
    outcome = dataclasses.replace(history.outcomes[0], status="deadline" if fails else "ok")
    finding = PROPERTIES["terminates"](dataclasses.replace(history, outcomes=[outcome]))
    return Report(history, [finding], Verdict.BROKEN if fails else Verdict.HELD)


def test_a_smaller_scenario_whose_fault_does_not_strike_is_no_smaller_failure() -> None:
    scenario = msgspec.structs.replace(PLAIN, faults=(faults.ClockJump(rank=0, step=3, seconds=-5.0),))

    def judged(smaller: Scenario) -> Report:
        return judgement(smaller, bool(smaller.faults), fired=int(smaller.workload.steps >= 3))

    found = shrink(judged, judgement(scenario, True), "terminates", 60.0)
    assert found.report.history.scenario.workload.steps == 3


def test_shrinking_ends_when_its_time_is_over() -> None:
    found = shrink(lambda scenario: judgement(scenario, True), judgement(PLAIN, True), "terminates", 0.0)
    assert found.report.history.scenario == PLAIN
    assert found.runs == 0


# -------------------------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "scenarios").glob("*.json")), ids=lambda p: p.stem)
def test_every_scenario_of_the_corpus_has_words(path: Path) -> None:
    scenario = Scenario.load(path)
    words = in_words(scenario)
    text = "\n".join(words)
    for fault in scenario.faults:
        assert f"Fault {fault.kind}" in text
    for table in scenario.tables:
        assert table.fqn in text
    assert text.count("started again") == len(scenario.restarts)
    assert "``" not in text
    assert not re.search(r": .*\b(delay_ms|seconds|duration_ms|step step|nth)\b", text)
    assert all(sentence.endswith(".") for sentence in words)


def test_a_scenario_in_words() -> None:
    scenario = msgspec.structs.replace(
        PLAIN,
        workload=Workload(steps=4, eval_every_steps=2, warmup_batches=1, checkpoint_every_steps=1, step_seconds=20.0),
        publisher=PublisherConfig(every_minutes=0.5, retain=True, readback=True),
        faults=(faults.StoreSlow(rank=1, delay_ms=400), faults.DiskCrash(rank=1, nth=2)),
        restarts=(Restart(world_size=1),),
    )
    assert in_words(scenario) == [
        "2 ranks train 4 steps, on 4 samples per rank and step.",
        "Table ebc.embedding_bags.item: 64 rows of 4 values, split by rows over the ranks.",
        "1 batch of warm-up come before start() and are then undone.",
        "Each rank publishes the rows that changed every 0.5 minutes, and a step takes 20 s, 16 rows to a request, and "
        "what is left at the end.",
        "After every 2 steps it evaluates on other ids, which must not be published.",
        "Model and publisher are saved every 1 step.",
        "A copy of every acknowledged delta is kept, and compared with the store at the end.",
        "Fault store-slow (rank=1, delay_ms=400): The store takes 400 ms longer before it commits and answers.",
        "Fault disk-crash (rank=1, nth=2): A rank is ended by SIGKILL in the middle of its 2nd write to a shard or "
        "manifest: half of the bytes are there.",
        "When the job has failed it is started again from its newest checkpoint, on 1 rank.",
        "The job must survive this and lose nothing.",
    ]


# ----------------------------------------------------------------------------------------------- a row's life, and time
@pytest.fixture
def lost() -> Report:
    """The last value of a row never came."""
    history = Model(msgspec.structs.replace(PLAIN, seed=3, workload=Workload(steps=6, batch_size=3))).run()
    ledger = next(iter(history.tables.values()))
    key = next(int(k) for k in ledger.keys if len(ledger.versions(int(k))) >= 3)
    final = ledger.final[key].tobytes()
    rows = [r for r in rows_of(history) if r["sk"] != key or r["embedding"].tobytes() != final]
    return judge(with_writes(history, rows))


def test_the_life_of_a_row_says_what_never_came(lost: Report) -> None:
    violation = next(v for v in lost.violations if v.property == "no-lost-rows")
    moments = story(lost.history, violation)
    texts = [f"{m.kind}: {m.text}" for m in moments]
    assert texts[0].startswith("model: before step 1: the model on rank")
    changes = [m for m in moments if m.kind == "model" and "now holds" in m.text]
    ledger = lost.history.tables[violation.table or ""]
    assert len(changes) == len(ledger.versions(violation.key or 0))
    accepted = [m for m in moments if m.text.startswith("accepted from rank")]
    assert len(accepted) == len([r for r in rows_of(lost.history) if r["sk"] == violation.key])
    assert texts[-1].startswith(
        ("store: at the end it serves the value of step", "store: at the end it serves the initial", "missing: ")
    )
    assert [m.t_ms for m in moments if m.t_ms is not None] == sorted(m.t_ms for m in moments if m.t_ms is not None)


def test_a_violation_of_no_row_has_no_life(lost: Report) -> None:
    violation = lost.violations[0]
    for changes in ({"key": None}, {"table": None}, {"key": 10**15}, {"key": -1}):
        assert story(lost.history, dataclasses.replace(violation, **changes)) == []


def test_a_long_life_is_cut_in_the_middle(lost: Report) -> None:
    violation = next(v for v in lost.violations if v.property == "no-lost-rows")
    row = next(r for r in rows_of(lost.history) if r["pk"] == violation.name)
    many = [{**row, "sk": violation.key, "ts": n, "t_ms": 5000.0 + n} for n in range(100)]
    moments = story(with_writes(lost.history, [*rows_of(lost.history), *many]), violation)
    assert len(moments) == STORY_MAX + 2  # what is left out, and the end
    assert sum(m.text.endswith(" more)") for m in moments) == 1


def test_a_timeline_marks_what_carried_the_row(suite: Suite, document: Document) -> None:
    for failure in document.failures:
        assert failure.timeline.lanes[:1] == ["rank0"]
        assert {"store", "supervisor"} <= set(failure.timeline.lanes)
        assert {m.lane for m in failure.timeline.marks} <= set(failure.timeline.lanes)
        struck = [m for m in failure.timeline.marks if m.kind == "fault"]
        assert struck
        assert all("FAULT strikes: store-error(" in m.text for m in struck)


def test_a_long_timeline_keeps_what_matters(lost: Report) -> None:
    history = lost.history
    violation = next(v for v in lost.violations if v.property == "no-lost-rows")
    step = next(e for e in history.events if e.kind == "step")
    many = [msgspec.structs.replace(step, t_ms=step.t_ms + n / 100) for n in range(3 * MARKS_MAX)]
    fault = Event(t_ms=step.t_ms + 1, who="store", kind="fault", data={"index": 0})
    long = dataclasses.replace(history, events=sorted([*history.events, *many, fault], key=lambda e: e.t_ms))
    drawn = timeline(long, violation)
    assert len(drawn.marks) <= MARKS_MAX
    assert drawn.left_out >= 2 * MARKS_MAX
    assert [m for m in drawn.marks if m.kind == "fault"]
    cited = {e.kind for e in violation.events}
    assert cited & {m.kind for m in drawn.marks}


def test_a_drawing_is_in_the_order_of_time_and_nothing_hides_behind_another(document: Document) -> None:
    for failure in document.failures:
        drawing = draw(failure.timeline)
        xs = [placed.x for placed in drawing["placed"]]
        assert xs == sorted(xs)
        places = [(placed.x, placed.y) for placed in drawing["placed"]]
        assert len(set(places)) == len(places)
        assert max(xs) < drawing["width"]
        assert max(placed.y for placed in drawing["placed"]) < drawing["height"]


# -------------------------------------------------------------------------------------------------------------- forms
def test_json_fits_its_schema_and_reads_back(document: Document) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    plain = json.loads(to_json(document))
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    validator.validate(plain)
    assert to_json(from_json(to_json(document))) == to_json(document)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**plain, "verdict": "passed"})
    with pytest.raises(msgspec.ValidationError, match="format 2"):
        from_json(json.dumps({**plain, "format": 2}))


def test_the_schema_in_the_documentation_is_the_one_in_use() -> None:
    """After a change: json.dumps(schema(), indent=1) into the file, and ``FORMAT`` up by one if the meaning changed."""
    assert json.loads((ROOT / "docs" / "report.schema.json").read_text()) == schema()


def test_json_keeps_every_key_and_bit() -> None:
    row = np.array([0.1, -0.0, np.nan, 1e-45], np.float32)
    report = judge(Model(PLAIN).run())
    violation = Violation("no-lost-rows", "gone", key=2**63 - 1, expected=row)
    report.findings[0].violations, report.findings[0].total = [violation], 1
    suite = Suite("t", "virtual", "smoke", 0, [PLAIN])
    suite.add(Run(PLAIN, describe(report), report))
    back = from_json(to_json(suite.document())).runs[0].findings[0].violations[0]
    assert back.key == 2**63 - 1
    assert back.expected[2] == "nan(0x7fc00000)"
    numbers = np.array([*back.expected[:2], back.expected[3]], np.float32)
    assert numbers.tobytes() == row[[0, 1, 3]].tobytes()


def test_junit_has_a_test_for_each_cell(document: Document) -> None:
    document = from_json(to_json(document))
    document.cells[-1].reason, document.cells[-1].verdict = "a \x00 \x1b[31m ]]> & <b>", "kit error"
    root = ElementTree.fromstring(to_junit(document))
    [suite] = root.iter("testsuite")
    cases = list(suite.iter("testcase"))
    assert [(c.get("classname"), c.get("name")) for c in cases] == [
        (f"deltaproof.{cell.family}", cell.property) for cell in document.cells
    ]
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.get(count) == str(len(list(suite.iter(kind))))
    failed = next(c for c in cases if c.get("classname") == "deltaproof.store" and c.get("name") == "no-silent-loss")
    failure = failed.find("failure")
    assert failure is not None
    assert "repeat with: deltaproof replay " in (failure.text or "")
    assert suite.get("errors") == "1"
    assert float(suite.get("time") or 0) == document.wall_s


def test_the_terminal_shows_what_broke_where_and_how_to_repeat_it(document: Document) -> None:
    out = io.StringIO()
    print_report(document, Console(file=out, width=150))
    text = out.getvalue()
    assert re.search(r"no-silent-loss +4? +.*2/2 broken +-", text) or re.search(r"no-silent-loss .* 2/2 broken", text)
    assert document.failures[0].replay in text
    assert "not tested: not-asked: the target keeps no shards" in text
    assert "not exercised: never-struck: never struck: clock-jump(rank=0, step=9, seconds=-60.0)" in text
    assert text.rstrip().splitlines()[-2].startswith("BROKEN: specimen:S08 breaks ")
    assert text.rstrip().splitlines()[-1] == "all of it again: deltaproof conform specimen:S08"


def test_the_page_needs_nothing_from_anywhere_and_escapes_what_it_shows(document: Document) -> None:
    hostile = from_json(to_json(document))
    hostile.target = "<script>alert(1)</script>"
    hostile.failures[0].in_words = ["</li><img src=http://example.com/x>"]
    hostile.failures[0].timeline.marks[0].text = '"><script>alert(2)</script>'
    page = to_html(hostile)
    assert page.count("<script>") == 1
    assert "<img" not in page
    tags = " ".join(re.findall(r"<[^>]*>", page))
    links = re.findall(r"""\b(?:src|href|action|data|xlink:href)\s*=\s*["']?([^"'\s>]+)""", tags)
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert "@import" not in page
    assert "url(" not in page


def test_the_page_has_all_that_is_asked_of_it(document: Document) -> None:
    page = to_html(document)
    assert page.index("BROKEN: specimen:S08") < page.index("Properties under faults")
    for failure in document.failures:
        assert failure.replay in page.replace("&#39;", "'")
        assert failure.in_words[0] in page
        assert failure.run.findings
    assert "the target keeps no shards" in page
    for name in PROPERTIES:
        assert name in page


def test_a_page_of_a_suite_that_held(tmp_path: Path) -> None:
    suite = Suite("reference", "virtual", "smoke", 0, [PLAIN])
    suite.add(run_one(VirtualEngine(), PLAIN, "reference"))
    paths = write(suite.document(), tmp_path / "new" / "folder")
    page = paths["html"].read_text()
    assert "HELD: nothing that reference was asked for broke" in page
    assert "What broke" not in page
    assert from_json(paths["json"].read_bytes()).verdict == "held"
    assert ElementTree.parse(paths["junit"]).getroot().tag == "testsuites"


def test_numbers_side_by_side() -> None:
    expected = [float(n) for n in range(64)]
    found = [n + (i in (40, 50)) for i, n in enumerate(expected)]
    side_by_side = elements(report_document.ViolationReport(message="", expected=expected, found=found))
    assert [e.place for e in side_by_side] == [0, 1, 2, 3, 4, 5, 40, 50]
    assert [e.place for e in side_by_side if e.differs] == [40, 50]
    nothing = elements(report_document.ViolationReport(message="", expected=[1.0], found=None))
    assert [(e.expected, e.found, e.differs) for e in nothing] == [("1", "nothing", True)]
    assert elements(report_document.ViolationReport(message="", found="a text")) == []


# ------------------------------------------------------------------------------------------------------------ browser
@pytest.fixture(scope="module")
def page_file(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page, with a failure of each kind in it: of a row, of names, of a hang with its stack."""
    wide = from_json(to_json(document))
    wide.target = "a.package.with.a.long.name.and_no_break_in_it_at_all_so_that_it_could_overflow:make_the_target"
    wide.failures.append(hang())
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(wide))
    return path


def hang() -> Failure:
    report = judgement(SPECIMENS["S09"].scenario, True)
    history = dataclasses.replace(report.history, stacks={0: "Thread 0x1:\n" + "  queue.py line 3 in put " * 20})
    outcome = dataclasses.replace(history.outcomes[0], status="deadline")
    broken = judge(dataclasses.replace(history, outcomes=[outcome, *history.outcomes[1:]]))
    violation = next(v for v in broken.violations if v.property == "terminates")
    return Failure(
        property="terminates",
        run=describe(broken),
        in_words=in_words(broken.history.scenario),
        timeline=timeline(broken.history, violation),
        shrunk_from="x",
    )


@pytest.mark.asyncio
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")
async def test_the_page_in_a_browser(page_file: Path) -> None:
    pictures = ROOT / "build" / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    async with chromium(find_chromium() or "") as page:
        backgrounds = set()
        for width in (390, 1280):
            for dark in (False, True):
                await page.open(page_file, width=width, dark=dark)
                await page.value("document.querySelectorAll('details').forEach(d => d.open = true)")
                # Wide tables and drawings scroll in their own boxes, the page never does.
                wide = await page.value(
                    "[document.documentElement.scrollWidth, ...[...document.querySelectorAll('body *')].filter(e => "
                    "e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, .wide, pre')).map(e => "
                    "e.outerHTML.slice(0, 80))]"
                )
                assert wide == [width], wide
                backgrounds.add(await page.value("getComputedStyle(document.body).backgroundColor"))
                await page.picture(pictures / f"{width}-{'dark' if dark else 'light'}.png")
        assert len(backgrounds) == 2, "light and dark look the same"

        await page.point_at(".mark.fault")
        shown = await page.value("document.querySelector('.said-by-mark').textContent")
        assert "FAULT strikes: store-error(" in shown
        width_of = "document.querySelector('.wide svg').getBoundingClientRect().width"
        before = await page.value(width_of)
        await page.value("document.querySelector('[data-zoom=\"1.5\"]').click()")
        assert await page.value(width_of) == pytest.approx(1.5 * before, abs=2)
        await page.value("document.querySelector('[data-zoom=\"0\"]').click()")
        assert await page.value(width_of) == before
        await page.point_at("h1")  # or what lies under the mouse would have its say too
        await page.value("document.querySelector('.wide').focus()")
        for kind in ("keyDown", "keyUp"):
            await page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
        assert await page.value("document.querySelector('.said-by-mark').textContent") != shown
        assert page.problems == []
        assert {url.partition(":")[0] for url in page.requests} <= {"file", "data"}

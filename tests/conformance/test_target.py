"""Targets: both seams, what they claim, and what is said about those with something wrong with them."""

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from deltaproof.conformance import profiles
from deltaproof.conformance import target as target_module
from deltaproof.conformance.check import check
from deltaproof.conformance.diagnosis import DIAGNOSES, diagnose
from deltaproof.conformance.profiles import PROFILES
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.suite import FAMILIES, Suite, families
from deltaproof.conformance.target import CAPABILITIES, capabilities, default_engine, missing, needs, seam_of
from deltaproof.conformance.verdict import Report
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.faults import (
    AnyFault,
    ClockJump,
    DiskError,
    LeakyError,
    RankRaise,
    StoreError,
    StorePartial,
    StoreTokenRevoked,
)
from deltaproof.simulator.history import RankOutcome
from deltaproof.simulator.scenario import Deadlines, PublisherConfig, Restart, Scenario, Table, Workload
from deltaproof.simulator.target import resolve
from deltaproof.simulator.virtual.engine import VirtualEngine

ROOT = Path(__file__).parent.parent.parent
SHORT = Scenario(
    name="short",
    tables=(Table(name="item", rows=16),),
    workload=Workload(steps=4),
    publisher=PublisherConfig(every_steps=2),
    deadlines=Deadlines(run_s=5, grace_s=1),
)
NAIVE = "examples.targets.naive:NaiveUploader"
TEMPLATES = "deltaproof.conformance.templates"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(ROOT))


def bad(name: str) -> str:
    return f"deltaproof_bad_targets:{name}"


def run(target: str, scenario: Scenario = SHORT, **publisher: object) -> Report:
    config = msgspec.structs.replace(scenario.publisher, **publisher)
    return check(VirtualEngine(), msgspec.structs.replace(scenario, publisher=config), target)


def broken(report: Report) -> set[str]:
    return {finding.property for finding in report.findings if finding.violations}


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_xyz:make", "cannot import target .*No module named 'no_such_module_xyz'"),
        (bad("no_such_name"), "cannot import target"),
        (
            bad("takes_two"),
            r"wrong signature: .*missing a required argument: 'path'; it takes \(context: .*, path: .*\)",
        ),
        (bad("returns_none"), "returned None: its factory has to return"),
        (
            bad("lacks_close"),
            "Product, which has no close; .* an uploader has start, submit, check_error, close",
        ),
        (bad("LacksFinish"), "LacksFinish, which has no paused, finish; a publisher has"),
        (
            bad("SubmitTakesOne"),
            r"wrong signature: SubmitTakesOne.submit .* is called with 2 arguments: too many positional",
        ),
        (bad("CannotTell"), r"contents\(\) has to return \(embedding_name, key, values\)"),
    ],
)
def test_a_target_that_is_none_is_bad_input(target: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        run(target)


def test_what_there_is_not_cannot_be_claimed() -> None:
    with pytest.raises(ScenarioError, match="claims 'arow'; known capabilities: feature-store, sdk, arrow"):
        capabilities(bad("ClaimsNonsense"))


def test_a_publisher_that_claims_restart_needs_its_calls() -> None:
    job = msgspec.structs.replace(SHORT.workload, checkpoint_every_steps=2)
    with pytest.raises(ScenarioError, match="has no state_dict, load_state_dict, start_over"):
        run(bad("LacksRestart"), msgspec.structs.replace(SHORT, workload=job))


# --------------------------------------------------------------------------------------------------------- diagnoses
def diagnosed(report: Report) -> dict[str, str]:
    return dict(diagnose(report.history))


def test_a_target_that_hangs_in_start_is_called_so() -> None:
    report = run(bad("HangsInStart"))
    assert set(diagnosed(report)) == {"hangs-in-start"}
    assert "terminates" in broken(report)


def test_a_factory_that_raises_is_called_so() -> None:
    assert diagnosed(run(bad("raises"))) == {"factory-raises": "rank 0: ValueError: no configuration file"}


def test_a_factory_may_refuse_the_version_that_serving_reads() -> None:
    report = run("reference", SPECIMENS["S48"].scenario)
    assert report.history.outcomes[0].where == "factory"
    assert not diagnose(report.history)


def test_a_target_that_a_fault_kept_from_starting_is_asked_on() -> None:
    faulty = msgspec.structs.replace(SHORT, name="faulty", faults=(StoreError(),))
    suite = Suite(bad("raises"), "virtual", "smoke", 0, [faulty, SHORT, faulty])
    for number, scenario in enumerate(suite.scenarios):
        suite.ask(VirtualEngine(), msgspec.structs.replace(scenario, name=f"{number}"))
    assert [bool(run.findings) for run in suite.runs.values()] == [True, True, False]
    assert suite.runs["2"].reason == "not asked: the target factory-raises"


def test_threads_that_close_leaves_are_named() -> None:
    report = run(bad("LeaksThread"))
    assert re.fullmatch("rank[01]: forgotten", diagnosed(report)["leaks-threads"])
    assert not broken(report)


def test_a_process_that_is_gone_without_a_word_is_told() -> None:
    history = run("reference").history
    assert not diagnose(history)
    history.outcomes = [dataclasses.replace(history.outcomes[0], status="vanished"), RankOutcome(1, "killed", -11)]
    assert diagnose(history) == [("dies", "rank 0: exit code 0")]


# ------------------------------------------------------------------------------------------------------ the two seams
@pytest.mark.parametrize(
    ("faults", "properties"),
    [
        ((), set()),
        ((ClockJump(rank=1, step=5, seconds=-600),), {"no-lost-rows", "incremental-read-complete"}),
        ((StoreError(status=403, rank=1, count=2),), {"no-lost-rows", "no-silent-loss"}),
        ((StoreError(status=503, rank=1, count=2),), {"no-lost-rows", "no-silent-loss"}),
        ((StorePartial(rank=1, rows_failed=4, count=2),), {"no-lost-rows", "no-silent-loss"}),
        ((RankRaise(rank=1, point="sdk.write", nth=2),), {"no-lost-rows", "no-silent-loss"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else "-".join(fault.kind for fault in value),
)
def test_the_naive_uploader_is_well_on_a_good_day_and_its_bugs_are_named(
    faults: tuple[AnyFault, ...], properties: set[str]
) -> None:
    """What its docstring says is found, is found."""
    many_rows = Table(name="item", rows=200)  # so that what was lost is seldom made good by a later touch
    work = Workload(steps=9, zipf_exponent=0.0)
    scenario = msgspec.structs.replace(SHORT, tables=(many_rows,), workload=work, faults=faults)
    report = run(NAIVE, scenario, upload_format="json")
    assert all(report.history.fired)
    assert broken(report) == properties


@pytest.mark.parametrize("kind", ["uploader", "publisher"])
def test_what_init_target_writes_holds(kind: str) -> None:
    """In a few scenarios; the soak tests take all."""
    target = f"{TEMPLATES}.{kind}:Adapter"
    why_not = missing(target, "virtual")
    for scenario in profiles.plan("smoke", "processes", 0, target)[5::3]:
        assert not broken(run(target, scenario)) or why_not(scenario), scenario.name


def test_a_seam_is_known_before_a_run() -> None:
    assert seam_of(resolve(f"{TEMPLATES}.uploader:Adapter")) == "uploader"
    assert seam_of(resolve(f"{TEMPLATES}.publisher:Adapter")) == "publisher"
    assert seam_of(resolve(bad("raises"))) == "uploader"
    assert seam_of(resolve(bad("lacks_close"))) is None


def test_the_uploader_gets_what_the_reference_would_send_and_may_refuse_the_version() -> None:
    report = run(f"{TEMPLATES}.uploader:Adapter", SPECIMENS["S48"].scenario)
    assert all(report.history.fired)
    assert not broken(report)
    assert report.history.outcomes[0].where == "start"


# ------------------------------------------------------------------------------------------------- a store of its own
def test_rows_are_compared_wherever_they_lie() -> None:
    report = run(bad("InMemory"))
    assert report.verdict.value == "held"
    assert report.rows_compared > 0
    silent = {f.property: f.reason for f in report.findings}
    assert "own store" in silent["no-silent-loss"]
    assert "own store" in silent["monotonic-reads"]


@pytest.mark.parametrize(
    ("name", "properties", "message"),
    [
        ("LosesZero", {"no-lost-rows"}, "the target's store has no row for this key"),
        ("KeepsFirst", {"no-lost-rows"}, "the target's store has the value of step"),
        ("Halves", {"no-lost-rows", "no-phantom-rows"}, "the target's store has a value the model never held"),
    ],
)
def test_what_is_wrong_with_it_is_found(name: str, properties: set[str], message: str) -> None:
    report = run(bad(name), msgspec.structs.replace(SHORT, seed=1))
    assert broken(report) == properties
    assert any(message in violation.message for violation in report.violations)


def test_redis_holds() -> None:
    pytest.importorskip("fakeredis")
    target = "examples.targets.other_store:RedisUploader"
    assert missing(target, "virtual")(SHORT) is None
    assert run(target).verdict.value == "held"


# ------------------------------------------------------------------------------------------------------ capabilities
@pytest.mark.parametrize(
    ("capability", "changes"),
    [
        ("minutes", {"publisher": PublisherConfig(every_minutes=1.0)}),
        ("role-names", {"publisher": PublisherConfig(naming="role")}),
        ("json", {"publisher": PublisherConfig(upload_format="json")}),
        ("int8", {"publisher": PublisherConfig(embedding_type="int8")}),
        ("retain", {"publisher": PublisherConfig(retain=True)}),
        ("readback", {"publisher": PublisherConfig(retain=True, readback=True)}),
        ("spill", {"publisher": PublisherConfig(spill=True)}),
        ("restart", {"workload": Workload(checkpoint_every_steps=2)}),
        ("restart", {"restarts": (Restart(),)}),
        ("dynamic", {"tables": (Table(name="item"), Table(name="ad", owner="dyn", sharding="dynamic"))}),
        ("feature-store", {"faults": (StoreError(),)}),
        ("feature-store", {"faults": (StoreTokenRevoked(),)}),
        ("sdk", {"faults": (LeakyError(rank=0),)}),
        ("sdk", {"faults": (RankRaise(rank=0, point="sdk.flush"),)}),
    ],
)
def test_a_scenario_that_needs_more_than_is_claimed_is_not_asked(capability: str, changes: dict[str, object]) -> None:
    scenario = msgspec.structs.replace(SHORT, **changes)
    assert capability in needs(scenario)
    assert missing("reference", "virtual")(scenario) is None
    why = missing(bad("LosesZero"), "virtual")(scenario) if capability != "json" else missing(NAIVE, "virtual")(SHORT)
    if capability not in ("minutes", "role-names", "dynamic"):  # which the kit's dumper does for an uploader
        assert why is not None
        assert "does not claim" in why


def test_faults_of_the_rank_need_no_capability() -> None:
    faults = (ClockJump(rank=0, step=1, seconds=1), RankRaise(rank=0, point="train.after-step"))
    assert set(needs(msgspec.structs.replace(SHORT, faults=faults))) == {"arrow"}


def test_programs_need_real_time_and_publishers_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchrec")
    publisher = f"{TEMPLATES}.publisher:Adapter"
    assert default_engine("exec:node x.mjs") == "processes"
    assert default_engine(NAIVE) == default_engine("reference") == "virtual"
    assert default_engine(publisher) == default_engine(bad("lacks_close")) == "processes"
    monkeypatch.setattr(target_module, "find_spec", lambda name: None)
    assert default_engine(publisher) == "virtual"


@pytest.mark.parametrize(("table", "page"), [(CAPABILITIES, "capabilities"), (DIAGNOSES, "diagnoses")])
def test_the_page_lists_what_there_is(table: dict[str, str], page: str) -> None:
    text = (ROOT / "docs/conformance.md").read_text()
    for name, meaning in table.items():
        assert f"| `{name}` | {meaning} |" in text, f"docs/conformance.md, {page}: {name}"


# ---------------------------------------------------------------------------------------------------------- profiles
@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing scenarios takes longer than running them."""
    few = {name: dataclasses.replace(p, generated={"virtual": 5, "processes": 0}) for name, p in PROFILES.items()}
    monkeypatch.setattr(profiles, "PROFILES", few)


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("engine", ["virtual", "processes"])
def test_a_profile_is_the_same_each_time_and_its_names_are_unique(engine: str) -> None:
    plan = profiles.plan("smoke", engine, 3)
    assert [s.to_json() for s in plan] == [s.to_json() for s in profiles.plan("smoke", engine, 3)]
    assert len({s.name for s in plan}) == len(plan)
    assert plan[0].name == "calm"
    assert {family for s in plan for family in families(s)} >= set(FAMILIES) - {"restart"}
    assert sum("generated" in s.name for s in plan) == (5 if engine == "virtual" else 0)
    assert [s.to_json() for s in plan] != [s.to_json() for s in profiles.plan("smoke", engine, 4)]


@pytest.mark.usefixtures("_few")
def test_profile_ci_has_the_scenario_of_every_known_bug() -> None:
    named = {s.name: s for s in profiles.plan("ci", "virtual", 0)}
    for specimen in SPECIMENS.values():
        assert named[specimen.scenario.name] == specimen.scenario
        assert named[f"{specimen.scenario.name}-4"].seed != specimen.scenario.seed


def test_scenarios_are_fitted_to_what_a_target_claims_and_stay_what_they_are() -> None:
    keeps = PublisherConfig(upload_format="arrow", embedding_type="int8", retain=True, readback=True, spill=True)
    calm = msgspec.structs.replace(SHORT, publisher=keeps)
    fitted = profiles._fitted(calm, frozenset({"json"})).publisher
    assert fitted == msgspec.structs.replace(PublisherConfig(), upload_format="json")
    assert not profiles._fitted(calm, frozenset({"readback"})).publisher.readback, "there would be nothing to read back"
    assert profiles._fitted(calm, frozenset(CAPABILITIES)).publisher == keeps
    disk = msgspec.structs.replace(calm, faults=(DiskError(rank=0),))
    assert profiles._fitted(disk, frozenset({"json"})).publisher.retain


@pytest.mark.parametrize(("profile", "engine"), [("hourly", "virtual"), ("smoke", "quantum")])
def test_an_unknown_profile_or_engine_is_bad_input(profile: str, engine: str) -> None:
    with pytest.raises(ScenarioError, match=r"unknown (profile 'hourly'|engine 'quantum'); known: "):
        profiles.plan(profile, engine, 0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_profile_ci_catches_every_known_bug() -> None:
    plan = profiles.plan("ci", "virtual", 0)
    for specimen in SPECIMENS.values():
        mine = [s for s in plan if s.name.startswith(specimen.scenario.name)]
        assert any(broken(run(f"specimen:{specimen.id}", s)) & set(specimen.properties) for s in mine), specimen.id


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["uploader", "publisher"])
def test_what_init_target_writes_holds_in_all_of_ci(kind: str) -> None:
    target = f"{TEMPLATES}.{kind}:Adapter"
    why_not = missing(target, "virtual")
    for scenario in profiles.plan("ci", "virtual", 0, target):
        if why_not(scenario) is None:
            assert not broken(run(target, scenario)), scenario.name

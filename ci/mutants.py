"""Mutation testing of reference/: is some test red when the code is wrong?

    python ci/mutants.py [--jobs N] [--out FOLDER] [--limit-s SECONDS] [--files delta.py …]

cosmic-ray makes the mutants, a seeded sample of them is run: each in a copy of the tree of its own, first against the
tests of its file, then, while these stay green, against the rest of tests/reference, as far as it imports the file.
Tests of whole process groups (marked xdist_group) are left out, but for the tracker, which has hardly any others.
Results are kept as they come, so that a run that was stopped goes on where it was; killed mutants of an unchanged file
are not run again, survivors are when a test has changed. The interpreter must have what the tests need, and what
cosmic-ray's operators do (cosmic-ray, parso, stevedore, attrs).

Exit codes: 0 enough killed, 1 too few, 2 cannot run, 3 time over before every mutant was run (run it again).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

try:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider
except ImportError as error:
    print(f"mutants: {error}: install cosmic-ray (requirements/dev.txt)", file=sys.stderr)
    raise SystemExit(2) from None

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/reference"
#: A file's own tests are test_NAME*.py, and these.
ALSO = {"publisher": ["test_restart.py"], "restart": ["test_publisher.py"]}
#: Files whose only tests run process groups; elsewhere these are left out: seconds each, and none for one file alone.
IN_PROCESSES = {"tracker"}
SLOW = {"test_tracker.py", "test_example.py"}
QUICK = "not gpu and not soak and not xdist_group"
#: Red when a known bug is *not* found: a test of the tests, which a mutant may turn red without being noticed itself.
LEFT_OUT = [
    f"{TESTS}/test_convergence.py::test_the_search_finds",
    # Compares its own file's name with that in a frame, which pytest's cached bytecode keeps from another copy.
    f"{TESTS}/test_connect.py::test_an_sdk_that_makes_no_client_is_told_apart_without_its_secrets",
]
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "deltaproof-failures", "shared")
OPERATORS = {name: kind() for name in OperatorProvider() if not (kind := OperatorProvider()[name]).arguments()}
#: A mutant that allocates without end must not take the machine with it.
DATA_BYTES_MAX = 16 << 30
KILLED_MIN = 0.85


class Stopped(Exception):
    """The run's time is over, or somebody interrupted it: what is still running has no result."""


@functools.lru_cache(maxsize=2)
def meaning(source: str) -> str:
    """Return what two sources have in common that differ in comments and layout only; SyntaxError when it is none."""
    return ast.dump(ast.parse(source))


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place of a file that cosmic-ray's `operator` can change."""

    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.operator}:{self.occurrence}"

    def code(self, source: str) -> str | None:
        """Return the changed source; None when it is no other program, or none at all."""
        try:
            code: str | None = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        except AttributeError:  # of cosmic-ray's exception replacer, where an `except` clause names a dotted class
            return None
        try:
            return None if code is None or meaning(code) == meaning(source) else code
        except SyntaxError:
            return None


def docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the docstrings of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (child for child in node.body[:1] if ast.get_docstring(node) is not None)


def code_lines(source: str) -> int:
    """Return the number of lines that hold more than a comment or a docstring."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in ignored for line in range(t.start[0], t.end[0] + 1)}
    return len(lines.difference(*(range(d.lineno, d.end_lineno + 1) for d in docstrings(ast.parse(source)))))  # type: ignore[attr-defined]


def without_effect(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts that only type checkers read; a mutant there says nothing about the tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield node


def mutants_of(file: str, source: str) -> dict[tuple[Any, Any], list[Mutant]]:
    """Return every mutant of a file by the place (start, end) that it changes."""
    nodes = list(ast_nodes(get_ast(source)))
    skipped = [
        ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))  # type: ignore[attr-defined]
        for part in without_effect(ast.parse(source))
    ]
    found = defaultdict(list)
    for name, operator in OPERATORS.items():
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start < last for first, last in skipped):
                found[start, end].append(Mutant(file, start[0], name, occurrence))
    return found


def first_of(kinds: list[Mutant], source: str) -> tuple[Mutant, str] | None:
    """Take mutants off a list until one is another program; cosmic-ray has no-ops and syntax errors among them."""
    while kinds:
        mutant = kinds.pop()
        if (code := mutant.code(source)) is not None:
            return mutant, code
    return None


def draw(file: str, source: str, wanted: int, seed: int) -> list[tuple[Mutant, str]]:
    """Return at most `wanted` mutants of a file with their code.

    Places are drawn first, then one mutant of each: cosmic-ray has a dozen for one operator of an expression, and would
    otherwise ask the same question of it again and again. Only when the places run out, a second of each.
    """
    rng = random.Random(f"{seed} {file}")
    places = [rng.sample(kinds, len(kinds)) for _, kinds in sorted(mutants_of(file, source).items())]
    rng.shuffle(places)
    drawn: list[tuple[Mutant, str]] = []
    while places and len(drawn) < wanted:
        found = (first_of(kinds, source) for kinds in places)
        drawn += itertools.islice(filter(None, found), wanted - len(drawn))
        places = [kinds for kinds in places if kinds]
    return drawn


def share(lines: dict[str, int], total: int, per_file_min: int) -> dict[str, int]:
    """Return how many mutants each file gets: by its lines of code, `total` of them or a few more."""
    return {file: max(per_file_min, math.ceil(total * n / sum(lines.values()))) for file, n in lines.items()}


class Runner:
    """Runs pytest in copies of the tree, until a deadline."""

    def __init__(self, work: Path, deadline_s: float, own_only: bool) -> None:
        self.work, self.deadline_s, self.own_only = work, deadline_s, own_only
        self.base = work / "base" / "deltaproof"
        self.red: set[str] = set()  # tests that fail without any mutant, and so prove nothing
        self.seconds: dict[str, float] = {}  # test file -> what it takes without a mutant
        self.reached: dict[str, set[str]] = {}
        self.empty: set[str] = set()  # test files of which nothing runs here
        self._running: set[int] = set()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End every pytest that runs; their mutants have no result."""
        with self._lock:
            self.deadline_s = 0
            for group in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def pytest(self, tree: Path, arguments: list[str], timeout_s: float, **environment: str) -> tuple[int | None, str]:
        """Return pytest's exit code (None: killed after `timeout_s`) and output.

        Raises Stopped when the run's time is over first.
        """
        command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=line", *arguments]
        command += [f"--deselect={test}" for test in [*LEFT_OUT, *sorted(self.red)]]
        path = os.pathsep.join(filter(None, [str(tree.parent), os.environ.get("PYTHONPATH")]))
        # One thread each: the workers fill the cores.
        more = {"PYTHONPATH": path, "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1", **environment}
        more["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.work / "hypothesis")
        more["TMPDIR"] = str(tree.parent)
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if time.monotonic() >= self.deadline_s:
                    raise Stopped
                process = subprocess.Popen(
                    command,
                    cwd=tree,
                    env=os.environ | more,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process.pid)
            try:
                code: int | None = process.wait(max(0, min(timeout_s, self.deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with self._lock:
                    # The whole group, in any case: a mutant may leave processes behind.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    self._running.discard(process.pid)
            if time.monotonic() >= self.deadline_s:
                raise Stopped
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def measure(self, test: str) -> None:
        """Run one test file without a mutant: its time, and which of its tests are red anyway."""
        cache = self.work / "cache" / test
        began = time.monotonic()
        chosen = [] if test in SLOW else ["-m", QUICK]
        code, output = self.pytest(self.base, [f"{TESTS}/{test}", *chosen, "-o", f"cache_dir={cache}"], 300)
        self.seconds[test] = time.monotonic() - began
        self.reached[test] = reached(test)
        failed = cache / "v" / "cache" / "lastfailed"
        red = set(json.loads(failed.read_text())) if failed.exists() else set()
        self.red |= red
        # 5: nothing collected. All skipped is 0, and no better.
        if code == 5 or (code == 0 and " passed" not in output) or (code == 1 and red and " passed" not in output):
            self.empty.add(test)
        elif code not in (0, 1) or (code == 1 and not red):
            self.empty.add(test)
            self.red.add(f"{TESTS}/{test} (as a whole)")
            print(f"mutants: {test} cannot run here (pytest: {code}):\n{output[-2000:]}", file=sys.stderr)

    def stages(self, file: str) -> Iterator[tuple[list[str], list[str]]]:
        """Yield test files and further arguments of pytest: the file's own, then the rest."""
        name = Path(file).stem
        usable = [test for test in sorted(self.seconds, key=self.seconds.__getitem__) if test not in self.empty]
        own = own_tests(name)
        yield [test for test in usable if test in own], ([] if name in IN_PROCESSES else ["-m", QUICK])
        if not self.own_only:
            rest = [test for test in usable if test not in own and test not in SLOW]
            yield [test for test in rest if name in self.reached[test]], ["-m", QUICK]

    def judge(self, mutant: Mutant, code: str) -> dict[str, Any]:
        """Run one mutant in a copy of the tree of its own; return what became of it."""
        began = time.monotonic()
        result = {"fate": "survived", "by": ""}
        with tempfile.TemporaryDirectory(dir=self.work, ignore_cleanup_errors=True) as folder:
            tree = Path(folder) / "deltaproof"
            shutil.copytree(self.base, tree)
            changed = tree / mutant.file
            changed.write_text(code)
            # Its compiled form is of the unchanged file, whose size and second the mutant may share.
            for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
                compiled.unlink()
            for tests, chosen in self.stages(mutant.file):
                if not tests:
                    continue
                # Twice the time and 20 s: the machine's load varies. The 20 s are those of the tests' own deadlines.
                timeout_s = 20 + 2 * sum(self.seconds[test] for test in tests)
                arguments = [*chosen, "-x", "-p", "no:cacheprovider", *(f"{TESTS}/{test}" for test in tests)]
                exit_code, output = self.pytest(tree, arguments, timeout_s, PYTHONDONTWRITEBYTECODE="1")
                if exit_code is None:
                    result = {"fate": "timed out", "by": f"{timeout_s:.0f} s"}
                elif exit_code not in (0, 5):
                    reason = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                    result = {"fate": "killed", "by": reason[0][:200] if reason else f"pytest: {exit_code}"}
                if result["fate"] != "survived":
                    break
        return result | {"seconds": round(time.monotonic() - began, 1)}


def own_tests(name: str) -> set[str]:
    """Return the names of the test files that are a reference file's own."""
    return {path.name for path in (ROOT / TESTS).glob(f"test_{name}*.py")} | set(ALSO.get(name, ()))


def imports(path: Path) -> Iterator[str]:
    """Yield the files of reference/ (and other names) that a file imports anywhere, without their suffix."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("deltaproof.reference.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f".{node.module or ''}" if node.level else (node.module or "")
            name = module.removeprefix("deltaproof.reference").removeprefix(".")
            yield from [name] if name else [alias.name for alias in node.names]


def reached(test: str) -> set[str]:
    """Return the files of reference/ that a test file can run in its own process: what it imports, and so on."""
    names = {path.stem for path in (ROOT / "reference").glob("*.py")}
    found: set[str] = set()
    ahead = [ROOT / TESTS / test, ROOT / TESTS / "conftest.py"]
    while ahead:
        new = (set(imports(ahead.pop())) & names) - found
        found |= new
        ahead += [ROOT / f"reference/{name}.py" for name in new]
    return found


def digest(paths: Iterable[Path]) -> str:
    """Return a short digest of the content of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


def percent(results: list[dict[str, Any]]) -> float:
    """Return the share of mutants that did not survive."""
    return 100 * sum(r["fate"] != "survived" for r in results) / len(results) if results else 100.0


def report(out: Path, about: dict[str, Any], lines: dict[str, int], results: list[dict[str, Any]]) -> str:
    """Write mutants.json and mutants.md; return the table."""
    rows, files = [], {}
    for file, count in [*lines.items(), ("all", sum(lines.values()))]:
        of = [r for r in results if file in ("all", r["file"])]
        fates = {fate: sum(r["fate"] == fate for r in of) for fate in ("killed", "timed out", "survived")}
        files[file] = {"code_lines": count, "mutants": len(of), **fates, "percent": round(percent(of), 1)}
        rows.append(f"| {file} | {count} | {len(of)} | {' | '.join(map(str, fates.values()))} | {percent(of):.1f} |")
    table = "\n".join(
        [
            "| file | code lines | mutants | killed | timed out | survived | killed or timed out, % |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *rows,
        ]
    )
    text = ["# Mutants of reference/", "", *(f"- {name}: {value}" for name, value in about.items()), "", table]
    for fate in ("survived", "timed out"):
        text += ["", f"## {fate.capitalize()}"]
        for r in sorted((r for r in results if r["fate"] == fate), key=lambda r: (r["file"], r["line"])):
            text += ["", f"{r['file']}:{r['line']} ({r['operator']}) {r['by']}", "```diff", r["diff"], "```"]
    (out / "mutants.md").write_text("\n".join(text) + "\n")
    (out / "mutants.json").write_text(json.dumps({**about, "files": files, "mutants": results}, indent=1) + "\n")
    return table


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Mutation testing of reference/.")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="workers (default: cores)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants", help="folder of the results")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="stop after this many seconds, keep the results"
    )
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--per-file-min", type=int, default=5, help="how many of each file at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="+", metavar="NAME.py", help="only these files of reference/")
    parser.add_argument("--own-only", action="store_true", help="run a file's own tests only, for a quick look")
    return parser.parse_args()


def main() -> int:
    """Draw, run, report; return the exit code."""
    options = parsed()
    deadline_s = time.monotonic() + options.limit_s
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # the tests' processes inherit it
    limit = DATA_BYTES_MAX if hard == resource.RLIM_INFINITY else min(hard, DATA_BYTES_MAX)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    options.out.mkdir(parents=True, exist_ok=True)

    sources = {
        f"reference/{path.name}": path.read_text()
        for path in sorted((ROOT / "reference").glob("*.py"))
        if not options.files or path.name in options.files
    }
    lines = {file: n for file, source in sources.items() if (n := code_lines(source))}
    if not lines:
        print(f"mutants: no code in reference/ by these names: {options.files}", file=sys.stderr)
        return 2
    print(f"mutants: seed {options.seed}, {options.jobs} workers, results in {options.out}", flush=True)

    tests_digest = digest((ROOT / TESTS).glob("*.py")) + (" own only" if options.own_only else "")
    digests = {file: digest([ROOT / file]) for file in lines}
    journal = options.out / "results.jsonl"
    known = {}
    for text in journal.read_text().splitlines() if journal.exists() else ():
        try:
            entry = json.loads(text)
        except ValueError:  # torn: the run was killed while it wrote
            continue
        current = entry["code"] == digests.get(entry["file"])
        if current and (entry["fate"] != "survived" or entry["tests"] == tests_digest):
            known[entry["key"]] = entry

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        runner = Runner(Path(folder), deadline_s, options.own_only)
        shutil.copytree(ROOT, runner.base, ignore=NOT_COPIED)
        pool = ThreadPoolExecutor(options.jobs)
        results: list[dict[str, Any]] = []
        drawn: list[tuple[Mutant, str]] = []
        try:
            names = {name for file in lines for name in own_tests(Path(file).stem)}
            if not options.own_only:
                names |= {path.name for path in (ROOT / TESTS).glob("test_*.py")} - SLOW
            measured = [pool.submit(runner.measure, name) for name in sorted(names)]
            # Meanwhile, as it is work for one core.
            for file, wanted in share(lines, options.sample, options.per_file_min).items():
                drawn += draw(file, sources[file], wanted, options.seed)
            random.Random(options.seed).shuffle(drawn)  # a part of the results is then a sample too
            for each in measured:
                each.result()
            print(f"mutants: {len(drawn)} drawn; red or without a test here: {sorted(runner.red | runner.empty)}")
            results += [known[mutant.key] for mutant, _ in drawn if mutant.key in known]
            print(f"mutants: {len(results)} known from earlier runs", flush=True)
            todo = {
                pool.submit(runner.judge, mutant, code): (mutant, code)
                for mutant, code in drawn
                if mutant.key not in known
            }
            with journal.open("a") as kept:
                for done in as_completed(todo):
                    mutant, code = todo[done]
                    before, after = sources[mutant.file].splitlines(), code.splitlines()
                    diff = difflib.unified_diff(before, after, mutant.file, mutant.file, n=1, lineterm="")
                    entry = {**dataclasses.asdict(mutant), "key": mutant.key, **done.result()}
                    entry |= {"diff": "\n".join(diff), "code": digests[mutant.file], "tests": tests_digest}
                    results.append(entry)
                    kept.write(json.dumps(entry) + "\n")
                    kept.flush()
                    print(f"{len(results)}/{len(drawn)} {entry['fate']} {mutant.key} {entry['seconds']} s", flush=True)
        except (Stopped, KeyboardInterrupt):
            print("mutants: stopped; the same command goes on from here", file=sys.stderr)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            pool.shutdown()

    complete = bool(drawn) and len(results) == len(drawn)
    about = {
        "seed": options.seed,
        "mutants run": f"{len(results)} of {len(drawn)}",
        "tests": "each file's own" if options.own_only else f"each file's own, then the rest of {TESTS}",
        "python": platform.python_version(),
        "red without a mutant": sorted(runner.red),
        "test files of which nothing ran": sorted(runner.empty),
    }
    print(report(options.out, about, lines, results))
    if not complete:
        return 3
    return 0 if percent(results) >= 100 * KILLED_MIN else 1


if __name__ == "__main__":
    sys.exit(main())

"""The package as others get it: what the wheel holds, what an import costs, which way imports point."""

import ast
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import deltaproof

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]

# Which part of the package may import which; "" is the root __init__.py, the public face.
MAY_IMPORT = {
    "": {"conformance", "fakes", "reference", "simulator"},
    "fakes": set(),
    "reference": set(),
    "simulator": {"fakes", "reference"},
    "conformance": {"fakes", "reference", "simulator"},
    "cli": {"conformance", "fakes", "reference", "simulator"},
    "__main__": {"cli"},
}
# Where tensors are needed. Elsewhere torch may be imported inside a function, by those who have it.
NEEDS_TORCH = ("reference.tracker", "simulator.processes")
TORCH_FAMILY = {"torch", "torchrec", "fbgemm_gpu", "tensordict"}


def sources() -> dict[str, Path]:
    """Every module of the package by its name below `deltaproof` ("" is the root)."""
    found = {}
    for package in PACKAGES:
        below = package.removeprefix("deltaproof").lstrip(".")
        for path in sorted((ROOT / below.replace(".", "/")).glob("*.py")):
            found[".".join(filter(None, [below, "" if path.stem == "__init__" else path.stem]))] = path
    return found


SOURCES = sources()


class Import(NamedTuple):
    """One import statement's target. `inside`: the name is below `deltaproof`; `at_top`: run when the module is."""

    name: str
    inside: bool
    absolute: bool
    at_top: bool
    line: int


def imports(module: str, path: Path) -> Iterator[Import]:
    """Every import of a module, resolved, in source order."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            deeper = at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                deeper = False
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield target(alias.name, at_top, child.lineno)
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                yield target(child.module or "", at_top, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                parts = package.split(".") if package else []
                base = parts[: len(parts) - (child.level - 1)] + (child.module.split(".") if child.module else [])
                for alias in child.names:
                    name = ".".join([*base, alias.name])
                    yield Import(name if name in SOURCES else ".".join(base), True, False, at_top, child.lineno)
            yield from walk(child, deeper)

    def target(name: str, at_top: bool, line: int) -> Import:
        inside = name.partition(".")[0] == "deltaproof"
        return Import(name.partition(".")[2] if inside else name, inside, True, at_top, line)

    yield from walk(ast.parse(path.read_text()), True)


def part(module: str) -> str:
    """The part of the layout that a module belongs to. The command line is ``cli.py`` and its ``cli_*.py``."""
    name = module.partition(".")[0]
    return "cli" if name.startswith("cli_") else name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy: a build leaves folders behind, and other tests read the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted, symlinks=True)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "tree"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        info = {Path(name).name for name in archive.namelist() if ".dist-info/" in name}
    expected = {f"deltaproof/{path.relative_to(ROOT)}" for path in SOURCES.values()}
    assert {name for name in names if name.endswith(".py")} == expected
    data = {
        "deltaproof/py.typed",
        "deltaproof/fakes/server/status.html",
        "deltaproof/conformance/report/report.html.j2",
    }
    assert data <= set(names)
    assert not [name for name in names if name.split("/")[1] in ("tests", "benchmarks", "examples", "ci", "docs")]
    assert {"LICENSE", "entry_points.txt", "METADATA"} <= info


def test_wheel_works_without_torch(wheel: Path, tmp_path: Path) -> None:
    """Everything but the torch users imports where torch is not installed, from the wheel alone."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    modules = [f"deltaproof.{name}".rstrip(".") for name in SOURCES if not name.startswith(NEEDS_TORCH)]
    script = f"""
import importlib, sys
import deltaproof
assert deltaproof.__file__.startswith({str(tmp_path)!r}), deltaproof.__file__
assert "torch" not in sys.modules, "import deltaproof imports torch"
for name in {sorted(TORCH_FAMILY)}:
    sys.modules[name] = None  # import NAME now raises ModuleNotFoundError
for name in {modules}:
    importlib.import_module(name)
print("imported", len({modules}))
"""
    # PYTHONPATH comes before the editable install of the tree that the tests run in.
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"imported {len(modules)}"


def test_public_names_load_when_used() -> None:
    for name in deltaproof.__all__:
        assert getattr(deltaproof, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        deltaproof.no_such_name  # noqa: B018


def test_every_package_folder_is_listed() -> None:
    """A package folder that pyproject.toml does not list works in the tree and is missing from the wheel."""
    listed = {ROOT / package.removeprefix("deltaproof").lstrip(".").replace(".", "/") for package in PACKAGES}
    for part_name in ("conformance", "fakes", "reference", "simulator"):
        for path in (ROOT / part_name).rglob("*.py"):
            assert path.parent in listed, f"{path.parent.relative_to(ROOT)} is not among the packages of pyproject.toml"
            assert (path.parent / "__init__.py").exists(), f"{path.parent.relative_to(ROOT)} has no __init__.py"


@pytest.mark.parametrize("module", [pytest.param(name, id=name or "deltaproof") for name in SOURCES])
def test_imports_point_one_way(module: str) -> None:
    allowed = MAY_IMPORT[part(module)]
    for found in imports(module, SOURCES[module]):
        where = f"{SOURCES[module].relative_to(ROOT)}:{found.line}"
        if found.inside:
            assert not found.absolute, f"{where}: inside the package imports are relative"
            target = part(found.name)
            # The root holds only what every part may know, such as __version__.
            assert target in {"", part(module)} | allowed, f"{where}: {part(module)} must not know {target}"
        elif found.at_top and not module.startswith(NEEDS_TORCH):
            assert part(found.name) not in TORCH_FAMILY, f"{where}: torch at the top of a module that must do without"


def test_requirements_pin_what_pyproject_asks_for() -> None:
    """Each dependency is pinned once, at a release that pyproject.toml admits."""
    pins = {}
    for path in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE):
            assert name not in pins, f"{name} is pinned twice"
            pins[canonicalize_name(name)] = version
    project = PYPROJECT["project"]
    for text in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        wanted = Requirement(text)
        if wanted.name != project["name"]:
            pin = pins.get(canonicalize_name(wanted.name))
            assert pin is not None, f"{wanted} is not pinned: .venv/bin/python ci/pin_requirements.py"
            assert wanted.specifier.contains(pin), f"{wanted} does not admit the pinned {pin}"


def test_tests_import_the_package_by_name() -> None:
    """`import fakes` works by accident when the tree's root is on sys.path, and loads everything a second time."""
    tops = {part(name) for name in SOURCES if name}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not (node.level and node.module):  # a test may share with a test
                names.append(node.module or ".")
            assert not {name.partition(".")[0] for name in names} & (tops | {""}), f"{path.relative_to(ROOT)}: {names}"

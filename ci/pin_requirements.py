"""Rewrite requirements/*.txt from what is installed in this interpreter's environment.

    .venv/bin/python ci/pin_requirements.py

Each file holds what pyproject.toml asks for and everything that pulls in, pinned to the installed version; a package
that an earlier file already pins is not repeated. Packages that merely happen to be installed are left out.
requirements/torchrec.txt is apart: torchrec asks for fbgemm-gpu, the CUDA build, where requirements/torch-cpu.txt
holds fbgemm-gpu-cpu; it has to be installed with --no-deps.
"""

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# The torch set of a machine without a GPU. torchrec's own needs, less fbgemm-gpu; iopath because torchrec's dataset
# helpers import it.
TORCH_CPU = [
    "torch",
    "fbgemm-gpu-cpu",
    "tensordict",
    "torchmetrics",
    "tqdm",
    "pyre-extensions",
    "iopath",
]
TORCHREC = "torchrec"


def closure(wanted: Iterable[str]) -> dict[str, str]:
    """Return {name: version} of the wanted requirements and everything they need here.

    Raises SystemExit when one is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(text) for text in wanted]
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here: install it, then pin again") from None
        # A local part (+cpu) names one index's build of the release; the pin is on the release.
        found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                queue.append(needed)
    return found


def write(file_name: str, pins: dict[str, str], *, includes: str | None, note: str) -> None:
    """Write one requirements file; `includes` names the file whose pins it builds on."""
    lines = [f"# {note}", "# Written by ci/pin_requirements.py from pyproject.toml: edit that, install, pin again."]
    lines += [f"-r {includes}"] if includes else []
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    path, text = ROOT / "requirements" / file_name, "\n".join(lines) + "\n"
    # An unchanged file keeps its time: make installs anew when one is newer than .venv.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    print(f"requirements/{file_name}: {len(pins)} packages")


def less(pins: dict[str, str], *earlier: dict[str, str]) -> dict[str, str]:
    """Return the pins that no earlier file holds."""
    return {name: version for name, version in pins.items() if not any(name in other for other in earlier)}


def main() -> None:
    """Rewrite the five files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = canonicalize_name(project["name"])

    base = closure(project["dependencies"])
    test = closure([*project["dependencies"], *extras["test"]])
    dev = closure([text for text in extras["dev"] if canonicalize_name(Requirement(text).name) != own])
    torch = closure(TORCH_CPU)
    write("base.txt", base, includes=None, note="What `pip install deltaproof` needs.")
    write("test.txt", less(test, base), includes="base.txt", note="What the tests need (extra `test`).")
    write(
        "dev.txt",
        less(dev, base, test),
        includes="test.txt",
        note="What `make lint` and `make mutants` need (extra `dev`).",
    )
    write(
        "torch-cpu.txt",
        less(torch, base, test, dev),
        includes="dev.txt",
        note="What the process engine needs on a machine without a GPU; torchrec.txt comes after it.",
    )
    write(
        "torchrec.txt",
        {TORCHREC: metadata.version(TORCHREC)},
        includes=None,
        note="Install with --no-deps: torchrec asks for the CUDA build of fbgemm-gpu, torch-cpu.txt has the CPU build.",
    )


if __name__ == "__main__":
    main()

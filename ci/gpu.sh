#!/usr/bin/env bash
# ci/gpu.sh [PYTEST ARGUMENTS]: the tests marked gpu, on this machine's GPUs.
# GPU_PYTHON=python3 names an interpreter that has the CUDA set already: it is checked and nothing is installed. Without
# it the set is installed into .venv-gpu once. docs/gpu.md has the combinations that were tested.
# Exit code: pytest's; 2 when there is no GPU or the set does not fit together.
set -euo pipefail
cd -- "$(dirname -- "$0")/.."

nvidia-smi -L || { echo "gpu.sh: no GPU: nvidia-smi finds none, so no test was run" >&2; exit 2; }

python=${GPU_PYTHON:-.venv-gpu/bin/python}
if [ -z "${GPU_PYTHON:-}" ] && [ ! -e .venv-gpu/set.stamp ]; then
  echo "gpu.sh: installing the CUDA set into .venv-gpu (minutes, once)"
  "${PYTHON:-python3}" -m venv .venv-gpu
  "$python" -m pip install -qq --disable-pip-version-check -r requirements/test.txt \
    "torch==${TORCH:-2.13.*}" "torchrec==${TORCHREC:-1.8.*}" "fbgemm-gpu==${FBGEMM:-1.8.*}"
  touch .venv-gpu/set.stamp
fi

"$python" - <<'CHECK'
import importlib.metadata as metadata
import sys

# torch -> the torchrec and fbgemm-gpu that are built for it
TOGETHER = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def version(*names):
    """major.minor of the first of these distributions that is installed, or of the module, which may have no metadata."""
    for name in names:
        try:
            return ".".join(metadata.version(name).split(".")[:2])
        except metadata.PackageNotFoundError:
            continue
    try:
        return ".".join(__import__(names[0].replace("-", "_")).__version__.split(".")[:2])
    except ImportError:
        fail(f"gpu.sh: {names[0]} is not installed")


torch, torchrec = version("torch"), version("torchrec", "torchrec-nightly")
fbgemm = version("fbgemm-gpu", "fbgemm-gpu-nightly")
print(f"gpu.sh: Python {sys.version.split()[0]}, torch {torch}, torchrec {torchrec}, fbgemm-gpu {fbgemm}")
if torch not in TOGETHER:
    print(f"gpu.sh: torch {torch} was never tried; tried: {', '.join(TOGETHER)}", file=sys.stderr)
elif {torchrec, fbgemm} != {TOGETHER[torch]}:
    fail(f"gpu.sh: torch {torch} goes with torchrec and fbgemm-gpu {TOGETHER[torch]}")
import torch

if not torch.cuda.is_available():
    fail(f"gpu.sh: this torch ({torch.__version__}) finds no CUDA device: a CPU build, or too old a driver")
print(f"gpu.sh: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, "
      f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
CHECK

status=0
# -rs: what was skipped was not run, and is listed with its reason.
make gpu-test GPU_PYTHON="$python" ARGS="-rs $*" || status=$?
[ "$status" -eq 0 ] && echo "gpu.sh: passed; tests listed as SKIPPED were not run" || echo "gpu.sh: failed ($status)" >&2
exit "$status"

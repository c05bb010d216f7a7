"""torchrun, as one node of a job runs it: its agent starts the ranks and watches them.

``python -m deltaproof.simulator.processes.agent REPORT SUPERVISOR_PID ARGUMENTS...`` is ``torchrun ARGUMENTS...``, and
besides: the agent ends when the supervisor is gone, and leaves in the file REPORT which ranks failed, with the exit
codes that only it can know.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from .lifeline import die_with_parent


def main(report: Path, arguments: list[str]) -> int:
    """Runs torchrun to its end. Returns its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    failures: dict[int, int] = {}
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    unfinished = report.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(failures))
    os.replace(unfinished, report)
    return int(bool(failures))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))

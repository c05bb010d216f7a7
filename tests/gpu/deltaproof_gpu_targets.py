"""Publishers in which the device fails, named as targets by the tests beside. Imported inside rank processes only."""

import contextlib
import threading
from typing import Any

from deltaproof.simulator.target import reference

STEP = 3


class FailsOn:
    """The reference, and on rank 1 a failure of the device in step 3, where a delta is gathered."""

    def __init__(self, context) -> None:
        self.rank = context.rank
        self.inner: Any = reference(context)

    def start(self) -> None:
        self.inner.start()

    def after_step(self, step: int) -> None:
        if self.rank == 1 and step == STEP:
            self.fail()
        self.inner.after_step(step)

    def paused(self):
        return self.inner.paused()

    def finish(self, step: int) -> None:
        self.inner.finish(step)

    def close(self) -> None:
        self.inner.close()

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)

    def fail(self) -> None:
        raise NotImplementedError


class OutOfMemory(FailsOn):
    """Asks for more than any device has."""

    def fail(self) -> None:
        import torch  # not at the top: the supervisor imports this module too

        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


class StickyError(FailsOn):
    """An index outside its tensor trips an assertion on the device: from here on every CUDA call of the rank fails."""

    def fail(self) -> None:
        import torch

        with contextlib.suppress(RuntimeError):  # as code does that logs an error and goes on
            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].cpu()


class StopsComing(FailsOn):
    """Leaves its peers alone in the next collective, and lives."""

    def fail(self) -> None:
        threading.Event().wait()

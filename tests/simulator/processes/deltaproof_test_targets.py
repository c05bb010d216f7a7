"""Publishers that misbehave, named as targets by the engine's tests. Imported inside rank processes only."""

import contextlib
import os
import threading


class Silent:
    """Publishes nothing and says all is well."""

    def __init__(self, context) -> None:
        self.rank = context.rank

    def start(self) -> None: ...

    def after_step(self, step: int) -> None: ...

    def paused(self):
        return contextlib.nullcontext()

    def finish(self, step: int) -> None: ...

    def close(self) -> None: ...


class HangsInStart(Silent):
    def start(self) -> None:
        threading.Event().wait()


class RaisesButLives(Silent):
    """Raises on rank 1 and leaves a thread behind that keeps the process alive."""

    def after_step(self, step: int) -> None:
        if self.rank == 1 and step == 2:
            threading.Thread(target=threading.Event().wait).start()
            raise RuntimeError("rank 1: step 2: the store said no")


class ExitsQuietly(Silent):
    def after_step(self, step: int) -> None:
        if step == 2:
            os._exit(0)


class NotAcknowledged(RuntimeError):
    unacknowledged = (2, 3)


class NamesSteps(Silent):
    def finish(self, step: int) -> None:
        raise NotAcknowledged(f"rank {self.rank}: steps 2 and 3 are not acknowledged")


def nothing(context) -> None:
    return None


not_callable = 7

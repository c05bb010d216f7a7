"""What keeps a process from outliving the supervisor that it works for."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent(supervisor_pid: int = 0) -> None:
    """End this process when the supervisor is gone, even by SIGKILL: nothing outlives it.

    The kernel signals the death of the parent, which may be a forkserver or an agent of torchrun; a thread waits for
    the end of the process that asked for this one, because the parent may have been gone before this line ran.
    ``supervisor_pid``: that process, where multiprocessing did not start this one.

    What this process starts itself is to end with it: it becomes a session of its own, which can be ended as a whole.
    """
    with contextlib.suppress(PermissionError):  # it is one already
        os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
    elif supervisor_pid:
        try:
            sentinel = os.pidfd_open(supervisor_pid)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        return

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="deltaproof-supervisor-watch", daemon=True).start()

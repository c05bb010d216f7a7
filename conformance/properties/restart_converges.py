"""The property ``restart-converges``."""

from __future__ import annotations

from ...simulator.history import History
from .. import evidence
from ..verdict import Finding
from .no_lost_rows import compare_rows


def restart_converges(history: History) -> Finding:
    """After a job that failed, was restarted from a checkpoint and then succeeded, the store serves for every row that
    any attempt touched exactly the bits that the restored and further trained model holds.

    A crash leaves the store in a state that no checkpoint describes. Rows that were dumped before the checkpoint and
    not yet acknowledged never arrived, and the model will not touch them again (S31); rows that were published after
    it hold values of steps which the restored model never made (S32); and a rank whose clock is behind the store's
    publishes into the past (S16). Training on repairs only what it happens to touch. So all keys count here, also
    those that only a discarded step ever looked up: the model holds their initial value again, and the store must have
    that or nothing. No known publisher held to this before the reference did.
    """
    finding = Finding("restart-converges", unit="rows")
    if not history.restarted:
        finding.reason = "the job was not restarted"
    elif not evidence.log_is_whole(history):
        finding.reason = "the view was deleted, and with it what it held"
    elif not history.succeeded:
        finding.reason = "the last attempt did not succeed, so its launcher knows that rows may be missing"
    else:
        compare_rows(history, finding)
    return finding

"""The properties: each is one function over a history that returns violations with evidence."""

from __future__ import annotations

from ..verdict import Property
from .bounded_memory import bounded_memory
from .fails_loudly import fails_loudly
from .incremental_read_complete import incremental_read_complete
from .monotonic_reads import monotonic_reads
from .names_match_export import names_match_export
from .no_lost_rows import no_lost_rows
from .no_phantom_rows import no_phantom_rows
from .no_secret_leak import no_secret_leak
from .no_silent_loss import no_silent_loss
from .quiet_hot_path import quiet_hot_path
from .readback_agrees import readback_agrees
from .restart_converges import restart_converges
from .retained_equals_store import retained_equals_store
from .terminates import terminates

#: Name -> function, in the order of reports.
PROPERTIES: dict[str, Property] = {
    "no-lost-rows": no_lost_rows,
    "no-phantom-rows": no_phantom_rows,
    "no-silent-loss": no_silent_loss,
    "monotonic-reads": monotonic_reads,
    "incremental-read-complete": incremental_read_complete,
    "names-match-export": names_match_export,
    "terminates": terminates,
    "fails-loudly": fails_loudly,
    "restart-converges": restart_converges,
    "retained-equals-store": retained_equals_store,
    "readback-agrees": readback_agrees,
    "quiet-hot-path": quiet_hot_path,
    "bounded-memory": bounded_memory,
    "no-secret-leak": no_secret_leak,
}

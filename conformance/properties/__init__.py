"""The properties: each is one function over a history that returns violations with evidence."""

from __future__ import annotations

from ..verdict import Property
from .fails_loudly import fails_loudly
from .monotonic_reads import monotonic_reads
from .names_match_export import names_match_export
from .no_lost_rows import no_lost_rows
from .no_phantom_rows import no_phantom_rows
from .no_silent_loss import no_silent_loss
from .terminates import terminates

#: Name -> function, in the order of reports.
PROPERTIES: dict[str, Property] = {
    "no-lost-rows": no_lost_rows,
    "no-phantom-rows": no_phantom_rows,
    "no-silent-loss": no_silent_loss,
    "monotonic-reads": monotonic_reads,
    "names-match-export": names_match_export,
    "terminates": terminates,
    "fails-loudly": fails_loudly,
}

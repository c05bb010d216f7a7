"""Names: which `embedding_name` a table is published under. Exporter and publisher both call this module, nothing else.

A table is known by its *table FQN*, `<owner>.embedding_bags.<table>` (EmbeddingBagCollection, "ebc") or
`<owner>.embeddings.<table>` (EmbeddingCollection, "ec"), where the owner is the module path without wrapper prefixes.
No torch here: an exporter that only reads a checkpoint can use it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Collection = Literal["ebc", "ec"]
Naming = Literal["fqn", "role"]
EmbeddingType = Literal["float32", "int8"]  # of published rows

SEGMENTS: dict[Collection, str] = {"ebc": "embedding_bags", "ec": "embeddings"}
WRAPPERS = ("_dmp_wrapped_module", "module")
TWINS = {"ebc_user": "ebc", "mc_ebc_user": "mc_ebc", "ec_dict_user": "ec_dict", "mc_ec_dict_user": "mc_ec_dict"}


class ContractError(ValueError):
    """The tables cannot be named without two of them sharing a name. Usual cure: rename a table or use naming="fqn"."""


class TableRef(msgspec.Struct, frozen=True):
    """One table of a model: owner module path (wrappers allowed), kind of collection, table name."""

    owner: str
    collection: Collection
    table: str


def strip_wrappers(path: str) -> str:
    """Module path without the leading prefixes that DistributedModelParallel and DDP add."""
    parts = path.split(".")
    while parts and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def fqn(owner: str, collection: Collection, table: str) -> str:
    """Owner-qualified table name. An owner that is the model itself ("") gives `embedding_bags.<table>`."""
    stem = strip_wrappers(owner)
    return f"{stem}.{SEGMENTS[collection]}.{table}" if stem else f"{SEGMENTS[collection]}.{table}"


def twin_of(owner: str) -> str:
    """Owner with user-side twin modules replaced by the module they copy (whole path segments only)."""
    return ".".join(TWINS.get(part, part) for part in strip_wrappers(owner).split("."))


def embedding_names(tables: Sequence[TableRef], naming: Naming = "fqn") -> dict[str, str]:
    """Published `embedding_name` of every table: `{table FQN: name}`.

    Two FQNs share a name only when one is the user-side twin of the other: both are copies of one table.

    Raises:
        ContractError: equal FQNs, an empty table name, or (role naming) one table name used twice in one role.
    """
    seen: set[str] = set()
    for ref in tables:
        full = fqn(ref.owner, ref.collection, ref.table)
        if not ref.table:
            raise ContractError(f"a table of owner {ref.owner!r} has an empty name; give it one")
        if full in seen:
            raise ContractError(f"two tables have the name {full!r}; rename one or move it under another module")
        seen.add(full)
    canonical = {
        fqn(ref.owner, ref.collection, ref.table): TableRef(twin_of(ref.owner), ref.collection, ref.table)
        for ref in tables
    }
    published = _fqn_names(canonical.values()) if naming == "fqn" else _role_names(canonical.values())
    return {full: published[ref] for full, ref in canonical.items()}


def _fqn_names(refs: Iterable[TableRef]) -> dict[TableRef, str]:
    names = {ref: fqn(ref.owner, ref.collection, ref.table) for ref in refs}
    # A table called "b.embeddings.c" can spell the FQN of another owner's table.
    if len(set(names.values())) != len(names):
        twice = sorted(name for name in names.values() if list(names.values()).count(name) > 1)[0]
        raise ContractError(f"two tables would be published as {twice!r}; rename one of them")
    return names


def _role_names(refs: Iterable[TableRef]) -> dict[TableRef, str]:
    """Table name; `__ec`/`__ebc` appended when both roles use it; `_1`, `_2`, … when that meets another name."""
    ordered = sorted(set(refs), key=lambda ref: (ref.table, ref.collection, ref.owner))
    roles: dict[str, list[TableRef]] = {}
    for ref in ordered:
        peers = roles.setdefault(ref.table, [])
        for peer in peers:
            if peer.collection == ref.collection:
                raise ContractError(
                    f"table {ref.table!r} is used by {peer.owner!r} and {ref.owner!r} in one role "
                    f"({ref.collection}); rename one or set naming='fqn'"
                )
        peers.append(ref)
    taken = set(roles)  # raw names stay reserved, so that a suffixed name never steals one
    names: dict[TableRef, str] = {}
    for table, peers in roles.items():
        for ref in peers:
            stem = name = table if len(peers) == 1 else f"{table}__{ref.collection}"
            number = 0
            while name in taken and len(peers) > 1:
                number += 1
                name = f"{stem}_{number}"
            taken.add(name)
            names[ref] = name
    return names

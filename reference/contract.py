"""Names: which `embedding_name` a table is published under. Exporter and publisher both call this module, nothing else.

A table is known by its *table FQN*, `<owner>.embedding_bags.<table>` (EmbeddingBagCollection, "ebc") or
`<owner>.embeddings.<table>` (EmbeddingCollection, "ec"), where the owner is the module path without wrapper prefixes.
No torch here: an exporter that only reads a checkpoint can use it too.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

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

    @property
    def fqn(self) -> str:
        return fqn(self.owner, self.collection, self.table)


class ManifestTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What serving must know of a table: the name of its rows in the store, how wide they are, and of which type."""

    table_fqn: str
    embedding_name: str
    dim: int  # numbers in a row; an int8 row has four bytes more
    dtype: EmbeddingType


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every table that is published, as a JSON file beside an exported model. Exporter and publisher make the same one
    from the same tables, byte for byte, so that comparing the two files compares the names.
    """

    naming: Naming
    tables: tuple[ManifestTable, ...]  # by FQN, ascending
    format: Literal[1] = 1

    @classmethod
    def of(cls, dims: Mapping[TableRef, int], naming: Naming = "fqn", dtype: EmbeddingType = "float32") -> Self:
        """Manifest of tables with their embedding dimensions.

        Raises:
            ContractError: the names collide (see `embedding_names`), or twins differ in dimension.
        """
        names, found = embedding_names(list(dims), naming), dict[str, int]()
        by_fqn = {ref.fqn: dim for ref, dim in dims.items()}
        for full, dim in by_fqn.items():
            if found.setdefault(names[full], dim) != dim:
                raise ContractError(f"{full!r} has dimension {dim}, its twin {found[names[full]]}; they are one table")
        return cls(naming, tuple(ManifestTable(full, names[full], by_fqn[full], dtype) for full in sorted(by_fqn)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file, replacing one that is there; a reader sees the old one or the new one, never a part."""
        partial = Path(f"{os.fspath(path)}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
        partial.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `write` wrote. Raises ContractError for a file that is not a manifest, or of another format."""
        try:
            manifest = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ContractError(f"{os.fspath(path)} is no manifest that this version reads: {error}") from error
        if len({table.table_fqn for table in manifest.tables}) < len(manifest.tables):
            raise ContractError(f"{os.fspath(path)} names a table twice; export it again")
        return manifest


def strip_wrappers(path: str) -> str:
    """Module path without the leading prefixes that DistributedModelParallel and DDP add."""
    return ".".join(itertools.dropwhile(WRAPPERS.__contains__, path.split(".")))


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
    canonical: dict[str, TableRef] = {}
    for ref in tables:
        if any("\ud800" <= letter <= "\udfff" for letter in ref.fqn):
            raise ContractError(f"the table name {ref.fqn!r} holds half a character (a surrogate); rename it")
        if not ref.table:
            raise ContractError(f"a table of owner {ref.owner!r} has an empty name; give it one")
        if ref.fqn in canonical:
            raise ContractError(f"two tables have the name {ref.fqn!r}; rename one or move it under another module")
        canonical[ref.fqn] = TableRef(twin_of(ref.owner), ref.collection, ref.table)
    published = _fqn_names(canonical.values()) if naming == "fqn" else _role_names(canonical.values())
    return {full: published[ref] for full, ref in canonical.items()}


def _fqn_names(refs: Iterable[TableRef]) -> dict[TableRef, str]:
    names = {ref: ref.fqn for ref in refs}
    # A table called "b.embeddings.c" can spell the FQN of another owner's table.
    if twice := sorted(name for name, count in Counter(names.values()).items() if count > 1):
        raise ContractError(f"two tables would be published as {twice[0]!r}; rename one of them")
    return names


def _role_names(refs: Iterable[TableRef]) -> dict[TableRef, str]:
    """Table name; `__ec`/`__ebc` appended when both roles use it; `_1`, `_2`, … when that meets another name."""
    roles: dict[str, dict[Collection, TableRef]] = {}
    for ref in sorted(set(refs), key=lambda ref: (ref.table, ref.collection, ref.owner)):
        if (peer := roles.setdefault(ref.table, {}).setdefault(ref.collection, ref)) != ref:
            raise ContractError(
                f"table {ref.table!r} is used by {peer.owner!r} and {ref.owner!r} in one role "
                f"({ref.collection}); rename one or set naming='fqn'"
            )
    taken = set(roles)  # raw names stay reserved, so that a suffixed name never steals one
    names: dict[TableRef, str] = {}
    for table, peers in roles.items():
        for collection, ref in peers.items():
            stem = name = table if len(peers) == 1 else f"{table}__{collection}"
            numbers = itertools.count(1)
            while name in taken and len(peers) > 1:
                name = f"{stem}_{next(numbers)}"
            taken.add(name)
            names[ref] = name
    return names

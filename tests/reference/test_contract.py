import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltaproof.reference.contract import (
    ContractError,
    Manifest,
    TableRef,
    embedding_names,
    fqn,
    strip_wrappers,
    twin_of,
)

SEGMENTS = [
    "model",
    "ebc",
    "ebc_user",
    "ec_dict",
    "ec_dict_user",
    "mc_ebc",
    "mc_ebc_user",
    "16",
    "embeddings",
    "x_user",
]
OWNERS = st.lists(st.sampled_from(SEGMENTS), max_size=4).map(".".join)
TABLES = st.one_of(
    st.sampled_from(
        ["t", "t__ec", "t__ebc", "t__ec_1", "t__ebc_1", "t__ec__ebc", "ebc_user", "b.embeddings.c", "用户"]
    ),
    st.text(min_size=1, max_size=200),
)
REFS = st.builds(TableRef, owner=OWNERS, collection=st.sampled_from(["ebc", "ec"]), table=TABLES)
LONG = "\N{OLD ITALIC LETTER A}" * 200  # four bytes a letter


@st.composite
def models(draw: st.DrawFn) -> list[TableRef]:
    """Tables of one model: some are twins of others, some are called by another's FQN or by the tail of it."""
    refs: list[TableRef] = draw(st.lists(REFS, min_size=1, max_size=6))
    for ref in draw(st.lists(st.sampled_from(refs), max_size=3)):
        full = fqn(ref.owner, ref.collection, ref.table)
        spelled = draw(st.sampled_from([full, full.partition(".")[2] or full, "x." + full]))
        refs.append(TableRef(draw(OWNERS), ref.collection, spelled))
        twin = ".".join({"ebc": "ebc_user", "ec_dict": "ec_dict_user"}.get(part, part) for part in ref.owner.split("."))
        refs.append(TableRef(twin, ref.collection, ref.table))
    return list({fqn(ref.owner, ref.collection, ref.table): ref for ref in refs}.values())


@pytest.mark.parametrize(
    ("path", "stripped"),
    [
        ("_dmp_wrapped_module.module.model.ebc", "model.ebc"),
        ("module.module.ebc", "ebc"),
        ("_dmp_wrapped_module", ""),
        ("", ""),
        ("model.module.ebc", "model.module.ebc"),
        ("modules.ebc", "modules.ebc"),
    ],
)
def test_wrappers_are_stripped_from_the_front_only(path: str, stripped: str) -> None:
    assert strip_wrappers(path) == stripped


def test_fqn_says_owner_collection_and_table() -> None:
    assert fqn("module.m.ebc", "ebc", "t") == "m.ebc.embedding_bags.t"
    assert fqn("m.ec", "ec", "t") == "m.ec.embeddings.t"
    assert fqn("_dmp_wrapped_module", "ec", "t") == "embeddings.t"


@pytest.mark.parametrize(
    ("owner", "twin"),
    [
        ("g.ebc_user", "g.ebc"),
        ("g.mc_ebc_user", "g.mc_ebc"),
        ("g.ec_dict_user.16", "g.ec_dict.16"),
        ("g.mc_ec_dict_user.16", "g.mc_ec_dict.16"),
        ("g.my_ebc_user", "g.my_ebc_user"),
        ("g.ebc_users", "g.ebc_users"),
    ],
)
def test_user_side_twins_publish_under_the_module_they_copy(owner: str, twin: str) -> None:
    assert twin_of(owner) == twin
    assert embedding_names([TableRef(owner, "ebc", "t")]) == {
        f"{owner}.embedding_bags.t": f"{twin}.embedding_bags.t",
    }


def test_a_table_named_like_a_twin_module_keeps_its_name() -> None:
    assert embedding_names([TableRef("m", "ec", "ebc_user")]) == {"m.embeddings.ebc_user": "m.embeddings.ebc_user"}


def test_twin_and_original_share_one_name_in_both_namings() -> None:
    refs = [TableRef("g.ebc", "ebc", "t"), TableRef("g.ebc_user", "ebc", "t")]
    assert set(embedding_names(refs).values()) == {"g.ebc.embedding_bags.t"}
    assert set(embedding_names(refs, "role").values()) == {"t"}


def test_role_names_are_suffixed_only_where_both_roles_use_the_table() -> None:
    names = embedding_names([TableRef("a", "ebc", "t"), TableRef("b", "ec", "t"), TableRef("b", "ec", "u")], "role")
    assert names == {"a.embedding_bags.t": "t__ebc", "b.embeddings.t": "t__ec", "b.embeddings.u": "u"}


def test_a_role_suffix_never_takes_the_name_of_a_raw_table() -> None:
    refs = [
        TableRef("a", "ebc", "t"),
        TableRef("b", "ec", "t"),
        TableRef("b", "ec", "t__ebc"),
        TableRef("b", "ec", "t__ebc_1"),
    ]
    names = embedding_names(refs, "role")
    assert names["a.embedding_bags.t"] == "t__ebc_2"
    assert names["b.embeddings.t__ebc"] == "t__ebc"
    assert names["b.embeddings.t__ebc_1"] == "t__ebc_1"


def test_one_table_name_twice_in_one_role_is_refused_by_name() -> None:
    refs = [TableRef("a", "ec", "t"), TableRef("b", "ec", "t")]
    assert len(set(embedding_names(refs).values())) == 2
    with pytest.raises(ContractError, match=r"'t' is used by 'a' and 'b' in one role \(ec\)"):
        embedding_names(refs, "role")


def test_equal_or_empty_names_are_refused() -> None:
    with pytest.raises(ContractError, match="two tables have the name"):
        embedding_names([TableRef("a", "ec", "t"), TableRef("module.a", "ec", "t")])
    with pytest.raises(ContractError, match="empty name"):
        embedding_names([TableRef("a", "ec", "")])
    with pytest.raises(ContractError, match="two tables"):
        embedding_names([TableRef("a", "ec", "b.embeddings.c"), TableRef("a.embeddings.b", "ec", "c")])


def test_names_that_meet_only_after_twins_are_mapped_are_refused() -> None:
    refs = [TableRef("a.ebc_user.embedding_bags.b", "ebc", "c"), TableRef("a.ebc", "ebc", "b.embedding_bags.c")]
    with pytest.raises(ContractError, match=r"would be published as 'a\.ebc\.embedding_bags\.b\.embedding_bags\.c'"):
        embedding_names(refs)


@given(st.lists(REFS, max_size=8, unique=True), st.sampled_from(["fqn", "role"]), st.randoms(use_true_random=False))
def test_names_are_one_to_one_up_to_twins_and_do_not_depend_on_order(refs, naming, random) -> None:
    try:
        names = embedding_names(refs, naming)
    except ContractError:
        return
    assert set(names) == {fqn(ref.owner, ref.collection, ref.table) for ref in refs}
    tables_by_name: dict[str, set[tuple[str, str, str]]] = {}
    for ref in refs:
        name = names[fqn(ref.owner, ref.collection, ref.table)]
        tables_by_name.setdefault(name, set()).add((twin_of(ref.owner), ref.collection, ref.table))
    assert all(len(tables) == 1 for tables in tables_by_name.values())
    assert len(tables_by_name) == len({(twin_of(ref.owner), ref.collection, ref.table) for ref in refs})
    shuffled = list(refs)
    random.shuffle(shuffled)
    assert embedding_names(shuffled, naming) == names


@given(st.lists(REFS, max_size=6, unique_by=lambda ref: (ref.table, ref.collection)))
def test_role_naming_refuses_nothing_but_real_duplicates(refs: list[TableRef]) -> None:
    full = [fqn(ref.owner, ref.collection, ref.table) for ref in refs]
    if len(set(full)) == len(full):
        assert len(set(embedding_names(refs, "role").values())) == len(refs)


@given(models(), st.sampled_from(["fqn", "role"]), st.sampled_from(["float32", "int8"]))
@example([TableRef(LONG, "ec", LONG), TableRef(LONG, "ebc", LONG), TableRef("a", "ec", LONG + "__ec")], "role", "int8")
@example(
    [TableRef("a.ebc_user", "ebc", "t"), TableRef("a.ebc", "ebc", "t"), TableRef("a.ebc", "ec", "t")], "fqn", "int8"
)
def test_the_manifest_on_disk_names_every_table_as_the_publisher_does(
    refs: list[TableRef], naming: Any, dtype: Any
) -> None:
    """One name per table and one table per name, twins being one table, and the same bytes from either side."""
    dims = {ref: 4 + 2 * len(twin_of(ref.owner)) for ref in refs}
    try:
        names = embedding_names(refs, naming)
    except ContractError:
        with pytest.raises(ContractError):
            Manifest.of(dims, naming, dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        exported, published = Path(folder) / "exported.json", Path(folder) / "published.json"
        Manifest.of(dims, naming, dtype).write(exported)
        Manifest.of(dict(reversed(dims.items())), naming, dtype).write(published)
        assert exported.read_bytes() == published.read_bytes()
        assert sorted(path.name for path in Path(folder).iterdir()) == ["exported.json", "published.json"]
        read = Manifest.read(exported)
        plain = json.loads(exported.read_text("utf-8"))
    assert {table.table_fqn: table.embedding_name for table in read.tables} == names
    assert {table.table_fqn: (table.dim, table.dtype) for table in read.tables} == {
        fqn(ref.owner, ref.collection, ref.table): (dim, dtype) for ref, dim in dims.items()
    }
    assert [table["embedding_name"] for table in plain["tables"]] == [names[key] for key in sorted(names)]
    tables = {(twin_of(ref.owner), ref.collection, ref.table) for ref in refs}
    assert len({table.embedding_name for table in read.tables}) == len(tables)


def test_twins_of_different_dimension_are_refused() -> None:
    with pytest.raises(ContractError, match=r"'a.ebc_user.embedding_bags.t' has dimension 8, its twin 4"):
        Manifest.of({TableRef("a.ebc", "ebc", "t"): 4, TableRef("a.ebc_user", "ebc", "t"): 8})
    with pytest.raises(ContractError, match=r"'a.ebc_user.embedding_bags.t' has dimension 4, its twin 8"):
        Manifest.of({TableRef("a.ebc", "ebc", "t"): 8, TableRef("a.ebc_user", "ebc", "t"): 4})


def test_half_a_character_is_refused() -> None:
    with pytest.raises(ContractError, match="surrogate"):
        embedding_names([TableRef("a", "ec", "t\ud83d")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(format=2), "no manifest that this version reads"),
        (lambda plain: plain["tables"][0].update(colour="red"), "no manifest that this version reads"),
        (lambda plain: plain["tables"].append(plain["tables"][0]), "names a table twice"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "manifest.json"
    Manifest.of({TableRef("a", "ec", "t"): 4}).write(path)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(ContractError, match=message):
        Manifest.read(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ContractError, match="no manifest"):
        Manifest.read(path)

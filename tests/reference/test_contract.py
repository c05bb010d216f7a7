import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.reference.contract import ContractError, TableRef, embedding_names, fqn, strip_wrappers, twin_of

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

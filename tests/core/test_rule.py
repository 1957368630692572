"""Sharding rules and plans: pure functions, no devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from expertmesh.core import MeshResource
from expertmesh.core.linear.gemm import gemm_dgrad_op, gemm_op, gemm_wgrad_op
from expertmesh.core.linear.grouped_gemm import grouped_gemm_op, grouped_gemm_wgrad_op
from expertmesh.core.linear.grouped_plan import expert_axes
from expertmesh.core.rule import Query, parse_rule, plan_by_rule, role_names
from expertmesh.core.specs import local_shape, pad_spec, spec_axes

MESH = {"dp": 2, "fsdp": 2, "ep": 4, "tp": 2}


def query(specs, shapes, results=None, **kwargs):
    padded = tuple(P(*s, *[None] * (len(n) - len(s))) for s, n in zip(specs, shapes, strict=True))
    return Query(padded, tuple(shapes), results, MESH, **kwargs)


def test_groups_take_the_ranks_of_the_operands():
    rule = parse_rule("t... k, k n... -> t... n...", [4, 3])
    assert rule.operands == (("t_0", "t_1", "t_2", "k"), ("k", "n_0", "n_1"))
    assert rule.results == (("t_0", "t_1", "t_2", "n_0", "n_1"),)
    # Two groups in one term: the other term tells.
    assert parse_rule("t... n..., k n... -> t... k", [4, 3]).operands[0] == (
        "t_0",
        "t_1",
        "n_0",
        "n_1",
    )
    assert parse_rule("... e -> e, ()", [1]).results == (("e",), ())


def test_a_group_is_as_long_as_the_option_of_its_name_says():
    sharding = "n..., lead... ..., k, lead... -> ..."
    rule = parse_rule(sharding, [None, 3, 1, None], {"lead": 1, "other": 2})
    assert rule.operands == ((), ("lead_0", "_0", "_1"), ("k",), ("lead_0",))
    assert rule.results == (("_0", "_1"),)
    assert rule.expand(("lead...", "k", "gone")) == {"lead_0", "k"}
    # As of a rule whose groups were expanded before.
    assert parse_rule("lead_0 _0 _1 -> _0", [3]).expand(("...",)) == {"_0", "_1"}


def test_a_group_that_no_operand_has_is_empty():
    sharding = "t k -> t k n..."
    rule = parse_rule(sharding, [2])
    assert rule.results == (("t", "k"),)
    assert role_names("tokens . -> tokens . .", sharding, rule)[1] == (("tokens", "."),)


@pytest.mark.parametrize("sharding, ndims", [("p t, p -> p", [2]), ("p t -> p", [3]), ("p t", [2])])
def test_rules_that_do_not_fit(sharding, ndims):
    with pytest.raises(ValueError, match="sharding rule"):
        parse_rule(sharding, ndims)


def test_roles():
    rule = parse_rule("t... k, k n... -> t... n...", [3, 2])
    operands, results = role_names(
        "tokens ., fsdp . -> tokens .", "t... k, k n... -> t... n...", rule
    )
    assert operands == (("tokens", "sequence", "."), ("fsdp", "."))
    assert results == (("tokens", "sequence", "."),)
    # Two groups of tokens in one term are as one.
    sharding = "lead... ... e -> lead... e"
    for lead, of_result in ((0, ()), (1, ("tokens",)), (2, ("tokens", "sequence"))):
        rule = parse_rule(sharding, [5], {"lead": lead})
        operands, results = role_names("tokens tokens . -> tokens .", sharding, rule)
        assert operands == (("tokens", "sequence", ".", ".", "."),)
        assert results == ((*of_result, "."),)
    # Of whole arrays the last dimension is of features.
    of_rows = [
        role_names("rows -> rows", "... -> ...", parse_rule("... -> ...", [n]))[0][0]
        for n in range(5)
    ]
    tokens = ("tokens", "sequence")
    assert of_rows == [(), tokens[:1], ("tokens", "."), (*tokens, "."), (*tokens, ".", ".")]
    # The second dimension of any other group has no role.
    rule = parse_rule("k, k n... -> n...", [1, 3])
    assert role_names("., . fsdp -> fsdp", "k, k n... -> n...", rule)[0][1] == (".", "fsdp", ".")
    assert role_names("", "p c k, e k n -> p c n", parse_rule("p c k, e k n -> p c n", [3, 3]))[
        0
    ] == (
        ("participants", ".", "."),
        ("experts", ".", "."),
    )


# (operand specs, wanted results) -> (operand specs, result specs, summed axes), requirements 2.1.2
GEMM_TABLE = [
    ("dp", [P("dp"), P()], [P("dp"), P(), P("dp"), ()]),
    ("fsdp on K", [P("fsdp"), P("fsdp")], [P("fsdp"), P(), P("fsdp"), ()]),
    ("fsdp on N", [P("fsdp"), P(None, "fsdp")], [P("fsdp"), P(), P("fsdp"), ()]),
    (
        "compound",
        [P(("fsdp", "ep")), P(("fsdp", "ep"))],
        [P(("fsdp", "ep")), P(), P(("fsdp", "ep")), ()],
    ),
    ("tp column", [P("dp"), P(None, "tp")], [P("dp"), P(None, "tp"), P("dp", None, "tp"), ()]),
    (
        "fsdp and tp on N",
        [P("fsdp"), P(None, ("fsdp", "tp"))],
        [P("fsdp"), P(None, "tp"), P("fsdp", None, "tp"), ()],
    ),
    ("tp row", [P("dp", None, "tp"), P("tp")], [P("dp", None, "tp"), P("tp"), P("dp"), ("tp",)]),
    (
        "partial overlap",
        [P(None, None, ("fsdp", "ep")), P("fsdp")],
        [P(None, None, ("fsdp", "ep")), P(("fsdp", "ep")), P(), ("fsdp", "ep")],
    ),
]


@pytest.mark.parametrize(
    "given, want", [row[1:] for row in GEMM_TABLE], ids=[row[0] for row in GEMM_TABLE]
)
def test_gemm_gathers_the_weight_only(given, want):
    plan = gemm_op.make_plan(query(given, [(16, 8, 16), (16, 16)]))
    x, w, y, summed = want
    pad = lambda s, n: P(*s, *[None] * (n - len(s)))  # noqa: E731
    assert plan.operand_specs == (pad(x, 3), pad(w, 2))
    assert plan.result_specs == (pad(y, 3),)
    assert plan.summed_axes == (summed,)


RESOURCE = MeshResource(dp_resource="dp", fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")

DP, SEQUENCE, SPLIT = P("dp"), P("dp", "tp"), P("dp", None, "tp")
COLUMNS, ROWS = P(None, "tp"), P("tp")

# Under a resource: op, operand specs, wanted result -> operand specs, result spec, summed axes
TENSOR_PARALLEL = [
    ("columns", gemm_op, [DP, COLUMNS], None, [DP, COLUMNS], SPLIT, ()),
    ("rows", gemm_op, [DP, ROWS], None, [SPLIT, ROWS], DP, ("tp",)),
    ("columns, split sequence", gemm_op, [SEQUENCE, COLUMNS], None, [DP, COLUMNS], SPLIT, ()),
    ("rows to split sequence", gemm_op, [DP, ROWS], SEQUENCE, [SPLIT, ROWS], SEQUENCE, ("tp",)),
    ("no tp on the weight", gemm_op, [SEQUENCE, P("fsdp")], None, [SEQUENCE, P()], SEQUENCE, ()),
    ("input gradient, columns", gemm_dgrad_op, [DP, COLUMNS], SEQUENCE, [SPLIT, COLUMNS], SEQUENCE, ("tp",)),
    ("input gradient, rows", gemm_dgrad_op, [SEQUENCE, ROWS], None, [DP, ROWS], SPLIT, ()),
    ("weight gradient, columns", gemm_wgrad_op, [SEQUENCE, DP], COLUMNS, [DP, SPLIT], COLUMNS, ("dp",)),
    ("weight gradient, rows", gemm_wgrad_op, [DP, SEQUENCE], ROWS, [SPLIT, DP], ROWS, ("dp",)),
]  # fmt: skip


@pytest.mark.parametrize("row", TENSOR_PARALLEL, ids=lambda row: row[0])
def test_the_weight_decides_over_tensor_parallel_axes(row):
    _, op, given, wanted, operands, result, summed = row
    shapes = [(16, 8, 16), (16, 8, 16) if op is gemm_wgrad_op else (16, 16)]
    ndim = 2 if op is gemm_wgrad_op else 3
    q = query(
        given, shapes, None if wanted is None else (pad_spec(wanted, ndim),), resource=RESOURCE
    )
    plan = op.make_plan(q)
    assert plan.operand_specs == tuple(map(pad_spec, operands, map(len, shapes)))
    assert plan.result_specs == (pad_spec(result, ndim),)
    assert plan.summed_axes == (summed,)


def test_wgrad_is_scattered_into_the_wanted_spec():
    shapes = [(16, 8, 16), (16, 8, 16)]
    plan = gemm_wgrad_op.make_plan(query([P(("fsdp", "ep"))] * 2, shapes, (P("fsdp", None),)))
    assert plan.result_specs == (P("fsdp", None),)
    assert plan.summed_axes == (("fsdp", "ep"),)
    plan = gemm_wgrad_op.make_plan(query([P("dp")] * 2, shapes, (P("fsdp", None),)))
    # An axis that shards no tokens: x is sliced, each device makes its part of the gradient.
    assert plan.operand_specs[0] == P("dp", None, "fsdp")
    assert plan.result_specs == (P("fsdp", None),)
    assert plan.summed_axes == (("dp",),)


def test_dgrad_sums_over_a_sharded_contraction():
    plan = gemm_dgrad_op.make_plan(
        query([P("dp", None, "tp"), P(None, "tp")], [(16, 8, 16), (16, 16)])
    )
    assert plan.summed_axes == (("tp",),)
    assert plan.result_specs == (P("dp", None, None),)


def test_axes_that_do_not_divide_are_dropped():
    plan = gemm_op.make_plan(query([P(("dp", "ep")), P()], [(6, 8, 16), (16, 16)]))
    assert plan.result_specs == (P("dp", None, None),)


def test_a_sum_that_does_not_divide_is_not_scattered():
    """K of 3 is wanted over fsdp: all devices get the whole sum."""
    given = query([P("fsdp"), P("fsdp")], [(8, 3), (8, 4)], (P("fsdp", None),))
    plan = plan_by_rule(given, parse_rule("t k, t n -> k n", [2, 2]), frozenset(), frozenset({"t"}))
    assert plan.result_specs == (P(None, None),) and plan.summed_axes == (("fsdp",),)


def test_a_factor_of_a_later_operand_alone_may_be_summed():
    given = query([P("dp"), P("ep")], [(8,), (8,)])
    plan = plan_by_rule(given, parse_rule("t, k -> t", [1, 1]), frozenset(), frozenset({"k"}))
    assert plan.operand_specs == (P("dp"), P("ep")) and plan.summed_axes == (("ep",),)


def test_axes_that_may_not_be_used_are_dropped():
    """Such as Manual ones, which the query's mesh lacks."""
    given = query([P(("stage", "dp"), "stage")], [(8, 8)])
    plan = plan_by_rule(given, parse_rule("t k -> t k", [2]), frozenset(), frozenset())
    assert plan.operand_specs == plan.result_specs == (P("dp", None),)


def test_a_dimension_of_results_only_is_not_cut():
    given = query([P("dp")], [(8,)], (P("dp", "ep"),))
    plan = plan_by_rule(given, parse_rule("t -> t e", [1]), frozenset(), frozenset())
    assert plan.result_specs == (P("dp", None),)


def test_decided_results_win_over_weights():
    q = query(
        [P("dp"), P(None, "tp")],
        [(16, 8, 16), (16, 16)],
        (P("dp", None, None),),
        results_decided=True,
    )
    assert gemm_op.make_plan(q).result_specs == (P("dp", None, None),)


@given(
    st.lists(st.sampled_from(list(MESH)), unique=True),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_expert_axes_give_each_shard_its_own_experts(axes, participants, num_sets):
    """Simulates every device: the experts that its rows need are the ones that it holds, in order."""
    if participants % num_sets:
        return
    p_axes, e_axes = expert_axes(tuple(axes), participants, num_sets, MESH)
    assert e_axes == p_axes[len(p_axes) - len(e_axes) :]
    shards = 1
    for axis in p_axes:
        shards *= MESH[axis]
    expert_shards = 1
    for axis in e_axes:
        expert_shards *= MESH[axis]
    local_p, local_sets = participants // shards, num_sets // expert_shards
    for device in range(shards):
        held = [(device % expert_shards) * local_sets + i for i in range(local_sets)]
        for i in range(local_p):
            assert held[i % local_sets] == (device * local_p + i) % num_sets


def test_grouped_gemm_slices_the_experts_and_gathers_fsdp():
    shapes = [(8, 32, 16), (8, 16, 16), (8, 2)]
    tokens = P(("fsdp", "ep"))
    plan = grouped_gemm_op.make_plan(query([tokens, P(None, None, "fsdp"), tokens], shapes))
    assert plan.operand_specs[1] == P("ep", None, None)
    wgrad = grouped_gemm_wgrad_op.make_plan(
        query(
            [tokens, tokens, tokens],
            [(8, 32, 16), (8, 32, 16), (8, 2)],
            (P("ep", None, "fsdp"),),
            options={"num_experts": 8},
        )
    )
    assert wgrad.result_specs == (P("ep", None, "fsdp"),)
    assert wgrad.summed_axes == (("fsdp",),)
    assert wgrad.options == {"num_experts": 2}


def test_grouped_gemm_gathers_fsdp_and_keeps_tp():
    """fsdp on E beside ep, tp on N: only fsdp is gathered, and the gradient is scattered back over it."""
    shapes, tokens = [(8, 32, 16), (16, 16, 16), (8, 4)], P(("fsdp", "ep"))
    weight = P(("ep", "fsdp"), None, "tp")
    plan = grouped_gemm_op.make_plan(query([tokens, weight, tokens], shapes, resource=RESOURCE))
    assert plan.operand_specs[1] == P("ep", None, "tp")
    assert plan.result_specs == (P(("fsdp", "ep"), None, "tp"),)
    assert plan.summed_axes == ((),) and plan.idle_axes == ()
    shapes = [(8, 32, 16), (8, 32, 16), (8, 4)]
    wgrad = grouped_gemm_wgrad_op.make_plan(
        query([tokens] * 3, shapes, (weight,), options={"num_experts": 16}, resource=RESOURCE)
    )
    assert wgrad.operand_specs[1] == P(("fsdp", "ep"), None, "tp")
    assert wgrad.result_specs == (weight,)
    assert wgrad.summed_axes == (("fsdp",),)


def test_idle_axes_are_named():
    shapes = [(8, 32, 16), (8, 16, 16), (8, 2)]
    given = [P("dp", "tp"), P("ep"), P("dp")]
    assert grouped_gemm_op.make_plan(query(given, shapes)).idle_axes == ("tp", "ep")
    assert grouped_gemm_op.make_plan(query(given, shapes, resource=RESOURCE)).idle_axes == ()


@st.composite
def layouts(draw):
    axes = draw(st.permutations([*MESH, None, None]))
    return P(*axes[:3]), P(*draw(st.permutations([*MESH, None]))[:2])


@given(layouts(), st.sampled_from([2, 3, 8, 16]), st.sampled_from([5, 8, 16]))
def test_a_plan_uses_each_axis_once_and_cuts_evenly(specs, a, b):
    shapes = [(a, b, 16), (16, b)]
    rule = parse_rule("t... k, k n... -> t... n...", [3, 2])
    plan = plan_by_rule(query(specs, shapes), rule, frozenset(), frozenset({"k"}))
    for spec, shape in zip(plan.operand_specs, shapes, strict=True):
        assert len(set(spec_axes(spec))) == len(spec_axes(spec))
        local_shape(shape, spec, MESH)
    result = plan.result_specs[0]
    assert len(set(spec_axes(result))) == len(spec_axes(result))
    local_shape((a, b, b), result, MESH)

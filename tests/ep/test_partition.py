"""Plans of the EP ops, without devices."""

import warnings

import pytest
from jax.sharding import PartitionSpec

from expertmesh.core.op import Query
from expertmesh.ep import partition
from expertmesh.ep.transports import cheapest

MESH = {"dp": 2, "fsdp": 3, "ep": 4, "tp": 5}


@pytest.mark.parametrize(
    "spec, sizes, axis, leading, participants",
    [
        (("ep",), (8,), ("ep",), ("ep",), "ep"),
        ((("dp", "ep"),), (8,), ("ep",), (("dp", "ep"),), ("dp", "ep")),
        ((("ep", "dp"),), (8,), ("ep",), (("ep", "dp"),), ("dp", "ep")),
        ((("dp", "fsdp", "ep"),), (24,), ("ep",), (("dp", "fsdp", "ep"),), ("dp", "fsdp", "ep")),
        (("dp", "ep"), (2, 4), ("ep",), ("dp", "ep"), ("dp", "ep")),
        (("ep", "dp"), (4, 2), ("ep",), ("ep", "dp"), ("dp", "ep")),
        ((("ep", "dp"),), (8,), ("dp", "ep"), (("ep", "dp"),), ("dp", "ep")),  # ranks go by `axis`
        ((None,), (8,), ("ep",), ("ep",), "ep"),  # resharded
        (("dp",), (8,), ("ep",), (("dp", "ep"),), ("dp", "ep")),
        (("dp", None), (2, 4), ("ep",), ("dp", "ep"), ("dp", "ep")),  # the batch has no room
        (("fsdp", None), (8, 6), ("ep",), ("ep", "fsdp"), ("fsdp", "ep")),  # 3 does not divide 8
        ((("dp", "fsdp", "ep"), None), (2, 12), (), ("dp", ("fsdp", "ep")), ("dp", "fsdp", "ep")),
        (("dp",), (8,), (), ("dp",), "dp"),
        ((None,), (7,), (), (None,), None),
        (("dp", "ep"), (2, 4), None, (None, None), None),
        (("ep",), (0,), ("ep",), ("ep",), "ep"),
        (("dp",), (8,), ("manual",), ("dp",), "dp"),
    ],
)
def test_layout(spec, sizes, axis, leading, participants):
    layout = partition.plan_layout(spec, sizes, MESH, axis)
    assert layout == (leading, participants)
    assert partition.plan_layout(layout.leading, sizes, MESH, axis) == layout


def test_layout_names_the_numbers_that_do_not_fit():
    with pytest.raises(ValueError) as error:
        partition.plan_layout(("dp", None), (2, 3), MESH, ("ep",))
    for words in ("(2, 3)", "{'dp': 2}", "['ep'] of [4] shards"):
        assert words in str(error.value)
    # An outer axis counts as the EP axis does: without it, each of its shards would do the same work.
    with pytest.raises(ValueError, match=r"\(8,\), sharded over {}, and \['fsdp'\] of \[3\]"):
        partition.plan_layout((("fsdp", "ep"),), (8,), MESH | {"dp": 1}, ("ep",))
    with pytest.raises(ValueError, match="12"):  # more than there are shards, but not a multiple
        partition.plan_layout((None,), (12,), {"ep": 8}, ("ep",))


def query(specs, shapes, axis):
    return Query(
        operand_specs=tuple(PartitionSpec(*s) for s in specs),
        shapes=shapes,
        result_specs=None,
        mesh_shape=MESH,
        options={"axis": axis},
    )


MAPS = (("dp", "ep", None), (("dp", "ep"), None), (("dp", "ep"), None, None))
MAP_SHAPES = ((2, 4, 3), (8, 5), (8, 4, 3))


def test_plans_follow_the_handle():
    """Tokens in another layout are resharded to the handle's; features keep the axes that tokens leave free."""
    for d, kept in [
        ("tp", "tp"),
        (("tp", "fsdp"), ("tp", "fsdp")),
        (("ep", "tp"), "tp"),
        ("dp", None),
    ]:
        tokens = query(((None, None, d), *MAPS), ((2, 4, 30), *MAP_SHAPES), ("ep",))
        plan = silently(partition.plan_dispatch, tokens)
        assert plan.operand_specs[0] == PartitionSpec("dp", "ep", kept)
        assert plan.operand_specs[1:] == tuple(PartitionSpec(*s) for s in MAPS)
        assert plan.result_specs == (PartitionSpec(("dp", "ep"), None, kept),)
        rows = query(((None, None, d), *MAPS), ((8, 5, 30), *MAP_SHAPES), ("ep",))
        back = silently(partition.plan_combine, rows)
        assert back.operand_specs[0] == plan.result_specs[0]
        assert back.result_specs == (plan.operand_specs[0],)


def silently(plan, query):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return plan(query)


@pytest.mark.parametrize(
    "plan, shape, words",
    [
        ("dispatch", (2, 4, 30), "resharded to P('dp', 'ep', 'tp')"),
        ("combine", (8, 5, 30), "resharded to P('dp', 'ep', 'tp')"),
    ],
)
def test_features_over_the_axes_of_tokens_are_a_warning(plan, shape, words):
    plan = getattr(partition, f"plan_{plan}")
    with pytest.warns(RuntimeWarning) as warned:
        plan(query(((None, None, ("ep", "tp")), *MAPS), (shape, *MAP_SHAPES), ("ep",)))
    (warning,) = warned
    assert words in str(warning.message) and "('ep', 'tp')" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(query(((None, None, "tp"), *MAPS), (shape, *MAP_SHAPES), ("ep",)))


def test_choices_sharded_in_k_are_a_warning():
    wrong = query((("dp", "ep", "tp"),), ((2, 4, 5),), ("ep",))
    with pytest.warns(RuntimeWarning, match=r"resharded to P\('dp', 'ep', None\)"):
        assert partition.plan_prepare(wrong).operand_specs[0] == PartitionSpec("dp", "ep", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition.plan_prepare(query((("dp", "ep", None),), ((2, 4, 5),), ("ep",)))


def test_features_that_do_not_divide_are_whole():
    tokens = query((("dp", "ep", "tp"), *MAPS), ((2, 4, 7), *MAP_SHAPES), ("ep",))
    assert partition.plan_dispatch(tokens).operand_specs[0] == PartitionSpec("dp", "ep", None)


def test_prepare_and_values():
    plan = partition.plan_prepare(query(((None, "dp", None),), ((4, 2, 3),), ("ep",)))
    each = ("dp", "ep")
    assert plan.operand_specs == (PartitionSpec("ep", "dp", None),)
    assert plan.result_specs[1:] == (
        PartitionSpec(each, None),
        PartitionSpec(each, None, None),
        PartitionSpec(each, None),
        PartitionSpec(each, None),
        PartitionSpec(each),
        PartitionSpec(each),
    )
    values = query(((None, None, None), *MAPS), ((2, 4, 3), *MAP_SHAPES), ("ep",))
    assert partition.plan_dispatch_values(values).result_specs == (PartitionSpec(each, None),)
    back = query(((None, None), *MAPS), ((8, 5), *MAP_SHAPES), ("ep",))
    assert partition.plan_combine_values(back).result_specs == (PartitionSpec("dp", "ep", None),)


@pytest.mark.parametrize(
    "T, K, C, R, itemsize, name",
    [
        (16, 2, 64, 1, 2, "local"),
        (16, 2, 64, 4, 2, "ring"),  # equal bytes
        (16, 2, 8, 4, 2, "all_to_all"),  # a rank has room for half of the tokens
        (16, 1, 64, 4, 2, "all_to_all"),  # sums of one row go back in bfloat16
        (16, 1, 64, 4, 4, "ring"),
        (0, 2, 0, 4, 2, "ring"),
        (16, 1, 4, 64, 1, "all_to_all"),  # ragged would move the least
    ],
)
def test_auto_takes_the_fewest_bytes(T, K, C, R, itemsize, name):
    assert cheapest(T, K, C, R, itemsize) == name

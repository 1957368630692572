"""Plans of the EP ops, without devices."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from expertmesh.core import MeshResource, TensorFormat, global_shard_guard
from expertmesh.core.op import Query
from expertmesh.ep import EpConfig, hosts, partition
from expertmesh.ep.transports.choice import Exchange, Unlinked, choose, received

MESH = {"dp": 2, "fsdp": 3, "ep": 4, "tp": 5}


def resolved(dp, ep, axis, resource, num_experts=8):
    mesh = AbstractMesh((2, 4), ("dp", "ep"), axis_types=(AxisType[dp], AxisType[ep]))
    config = EpConfig(num_experts=num_experts, axis=axis)
    with jax.sharding.use_abstract_mesh(mesh), global_shard_guard(resource):
        return partition.resolve_axis(config, np.zeros((8, 2), np.int32))


@pytest.mark.parametrize(
    "dp, ep, axis, resource, want",
    [
        ("Explicit", "Explicit", "ep", None, ("ep",)),
        ("Explicit", "Explicit", None, None, ()),
        ("Explicit", "Explicit", None, MeshResource(ep_resource="ep"), ("ep",)),
        ("Explicit", "Explicit", ("dp", "ep"), MeshResource(ep_resource="ep"), ("dp", "ep")),
        ("Explicit", "Auto", "ep", None, ("ep",)),
        ("Auto", "Auto", "ep", None, None),
        ("Auto", "Auto", "ep", MeshResource(dp_resource="dp"), ("ep",)),
        ("Auto", "Auto", (), MeshResource(dp_resource="dp"), ()),
    ],
)
def test_the_axis_is_the_configs_else_the_resources(dp, ep, axis, resource, want):
    assert resolved(dp, ep, axis, resource) == want


@pytest.mark.parametrize(
    "axis, resource, num_experts, words",
    [
        (None, MeshResource(dp_resource="dp"), 8, "the MeshResource must name the ep axis"),
        ("x", None, 8, "must be an axis of the mesh; got axis='x', mesh axes=('dp', 'ep')"),
        (None, MeshResource(ep_resource=("ep", "x")), 8, "got axis='x'"),
        ("ep", None, 6, "got num_experts=6, ep_size=4, axis='ep'"),
    ],
)
def test_axes_that_are_none(axis, resource, num_experts, words):
    with pytest.raises(ValueError) as error:
        resolved("Explicit", "Explicit", axis, resource, num_experts)
    assert words in str(error.value)


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


ALL = MeshResource(dp_resource="dp", cp_resource="cp", ep_resource="ep")


@pytest.mark.parametrize(
    "axes, spec, shape, resource, want",
    [
        ("Auto Auto Auto", (), (16, 4, 3), ALL, ("dp", "cp", "ep")),
        ("Auto Auto Auto", (), (16, 3), ALL, ("dp", "ep")),
        ("Auto Auto Auto", (), (4, 3), MeshResource(ep_resource="ep"), ("ep",)),
        ("Explicit Explicit Explicit", (("dp", "ep"), "cp"), (16, 4, 3), ALL, ("dp", "cp", "ep")),
        ("Explicit Explicit Explicit", (("cp", "ep"),), (16, 3), ALL, ("cp", "ep")),
        ("Explicit Auto Auto", (None, "dp"), (4, 4, 3), ALL, ("dp", "cp", "ep")),
    ],
)
def test_participants_are_all_that_the_exchange_splits_tokens_over(
    axes, spec, shape, resource, want
):
    types = tuple(AxisType[name] for name in axes.split())
    mesh = AbstractMesh((2, 2, 4), ("dp", "cp", "ep"), axis_types=types)
    found = []
    with jax.sharding.use_abstract_mesh(mesh), global_shard_guard(resource):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        slot = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        jax.eval_shape(lambda x: found.append(partition.resource_of_rows(x, ("ep",))), slot)
    assert found[0].axes("participants") == want
    assert found[0].axes("tokens") == resource.axes("tokens")


def test_participants_are_left_as_they_are():
    slot = jax.numpy.zeros((4, 3), np.int32)
    with global_shard_guard(ALL):
        assert partition.resource_of_rows(slot, ()) is ALL
    mesh = AbstractMesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert partition.resource_of_rows(slot, ("ep",)) is None


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


def query(specs, shapes, axis, **options):
    return Query(
        operand_specs=tuple(PartitionSpec(*s) for s in specs),
        shapes=shapes,
        result_specs=None,
        mesh_shape=MESH,
        options={"axis": axis, **options},
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


def test_an_axis_whose_name_is_in_anothers_is_another():
    maps = (("ep", None), ("ep", None), ("ep", None, None))
    tokens = query((("ep", "p"), *maps), ((8, 10), (8, 3), (4, 5), (4, 8, 3)), ("ep",))
    tokens = dataclasses.replace(tokens, mesh_shape={"ep": 4, "p": 5})
    assert partition.plan_dispatch(tokens).operand_specs[0] == PartitionSpec("ep", "p")


def test_features_of_any_size_are_split():
    tokens = query((("dp", "ep", "tp"), *MAPS), ((2, 4, 15), *MAP_SHAPES), ("ep",))
    assert partition.plan_dispatch(tokens).operand_specs[0] == PartitionSpec("dp", "ep", "tp")


@pytest.mark.parametrize(
    "size, block, kept",
    [(40, 4, "tp"), (22, 4, None), (10, 5, None)],  # whole blocks; a half block; two blocks, not 5
)
def test_blocks_are_not_cut(size, block, kept):
    """Data and scales of a quantized token are split alike; so are sums that are quantized on their way."""
    format = TensorFormat(dtype="float8_e4m3fn", block=(1, block))
    shapes = ((2, 4, size), (2, 4, -(-size // block)), *MAP_SHAPES)
    tokens = ("dp", "ep", "tp")
    plan = partition.plan_dispatch_quantized(
        query((tokens, tokens, *MAPS), shapes, ("ep",), format=format)
    )
    at, rows = PartitionSpec("dp", "ep", kept), PartitionSpec(("dp", "ep"), None, kept)
    assert plan.operand_specs == (at, at, *(PartitionSpec(*s) for s in MAPS))
    assert plan.result_specs == (rows, rows)
    back = query(
        (((None, None, "tp")), *MAPS), ((8, 5, size), *MAP_SHAPES), ("ep",), wire_format=format
    )
    assert partition.plan_combine(back).operand_specs == (rows, *plan.operand_specs[2:])
    assert partition.plan_combine(back).result_specs == (at,)


def test_rows_of_the_host_lie_as_rows_do():
    maps, shapes = (*MAPS, MAPS[-1]), (*MAP_SHAPES, MAP_SHAPES[-1])
    tokens, at = ("dp", "ep", None), tuple(PartitionSpec(*spec) for spec in maps)
    plan = partition.plan_dispatch(query((tokens, *maps), ((2, 4, 8), *shapes), ("ep",)))
    assert plan.operand_specs[1:] == at
    rows = (("dp", "ep"), None, None)
    plan = partition.plan_combine(query((rows, *maps), ((8, 5, 8), *shapes), ("ep",)))
    assert plan.operand_specs[1:] == at
    format = TensorFormat(dtype="float8_e4m3fn", block=(1, 4))
    both = query((tokens, tokens, *maps), ((2, 4, 8), (2, 4, 2), *shapes), ("ep",), format=format)
    assert partition.plan_dispatch_quantized(both).operand_specs[2:] == at


@pytest.mark.parametrize(
    "transport, axis, two_level",
    [
        ("two_level", ("a", "b"), True),
        ("two_level:ring", ("a", "b", "c"), True),
        ("two_level", ("a",), False),
        ("two_level", (), False),
        ("two_level", None, False),
        ("ring", ("a", "b"), False),
    ],
)
def test_two_levels_take_two_axes(transport, axis, two_level):
    assert partition.is_two_level(transport, axis) is two_level


@pytest.mark.parametrize(
    "transport, axis, size, name",
    [
        ("auto", ("a", "b"), 4, "two_level"),
        ("auto", ("a", "b", "c"), 4, "two_level"),
        ("auto", ("c", "b"), 4, "auto"),
        ("auto", ("a",), 4, "auto"),
        ("auto", (), 4, "auto"),
        ("auto", None, 4, "auto"),
        ("auto", ("a", "b"), 8, "auto"),  # all on one host
        ("ring", ("a", "b"), 4, "ring"),
        ("two_level:ring", ("a", "b"), 4, "two_level:ring"),
    ],
)
def test_what_auto_is_over_hosts(transport, axis, size, name, monkeypatch):
    """Of a mesh of 8 devices, `size` to a host."""
    monkeypatch.setattr(hosts, "host_of", lambda device: device.id // size)
    mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    config = EpConfig(num_experts=16, transport=transport)
    with jax.sharding.use_abstract_mesh(mesh):
        assert partition.resolve_transport(config, axis, np.zeros((8, 2), np.int32)) == name


def test_hosts_of_a_token():
    mesh = AbstractMesh((4, 2, 3), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    grouped = EpConfig(num_experts=24, num_groups=4, group_topk=2)
    with jax.sharding.use_abstract_mesh(mesh):
        idx = np.zeros((8, 1, 3), np.int32)
        assert partition.hosts_of_token(EpConfig(num_experts=24), ("a", "b"), idx) == 3
        assert partition.hosts_of_token(EpConfig(num_experts=24), ("b", "a"), idx) == 2
        assert partition.hosts_of_token(grouped, ("a", "b"), idx) == 2


def test_sums_in_a_dtype_have_no_blocks():
    rows = query(
        ((None, None, "tp"), *MAPS), ((8, 5, 15), *MAP_SHAPES), ("ep",), wire_format="bfloat16"
    )
    assert partition.plan_combine(rows).result_specs == (PartitionSpec("dp", "ep", "tp"),)


def test_without_participants_nothing_is_said_of_choices_sharded_in_k():
    """The compiler's layouts: it reshards as it likes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = partition.plan_prepare(query((("dp", "ep", "tp"),), ((2, 4, 5),), None))
    assert plan.operand_specs == (PartitionSpec(None, None, None),)


def test_prepare_and_values():
    plan = partition.plan_prepare(query(((None, "dp", None),), ((4, 2, 3),), ("ep",)))
    each = ("dp", "ep")
    assert plan.operand_specs == (PartitionSpec("ep", "dp", None),)
    assert plan.result_specs[1:] == (
        PartitionSpec(each, None),
        PartitionSpec(each, None, None),
        PartitionSpec(each, None),
        PartitionSpec(each, None),
        *(PartitionSpec(each),) * 3,
    )
    two = partition.plan_prepare(
        query(((None, "dp", None),), ((4, 2, 3),), ("ep",), two_level=True)
    )
    assert two.result_specs == (*plan.result_specs, PartitionSpec(each, None, None))
    values = query(((None, None, None), *MAPS), ((2, 4, 3), *MAP_SHAPES), ("ep",))
    maps = tuple(PartitionSpec(*s) for s in MAPS)
    there = partition.plan_dispatch_values(values)
    assert there.operand_specs == (maps[0], *maps)
    assert there.result_specs == (PartitionSpec(each, None),)
    back = query(((None, None), *MAPS), ((8, 5), *MAP_SHAPES), ("ep",))
    plan = partition.plan_combine_values(back)
    assert plan.operand_specs == (maps[1], *maps)
    assert plan.result_specs == (PartitionSpec("dp", "ep", None),)


@pytest.mark.parametrize(
    "T, K, C, R, dtype, name",
    [
        (16, 2, 64, 1, "bfloat16", "local"),
        (16, 2, 64, 4, "bfloat16", "ring"),  # equal bytes
        (16, 2, 8, 4, "bfloat16", "all_to_all"),  # a rank has room for half of the tokens
        (16, 1, 64, 4, "bfloat16", "all_to_all"),  # sums of one row go back in bfloat16
        (16, 1, 64, 4, "float32", "ring"),
        (0, 2, 0, 4, "bfloat16", "ring"),
        (16, 1, 4, 64, "uint8", "all_to_all"),  # ragged would move the least
    ],
)
def test_auto_takes_the_fewest_bytes(T, K, C, R, dtype, name):
    exchange = Exchange(num_tokens=T, top_k=K, capacity=C, ep_size=R, dtype=dtype, platform="cuda")
    assert choose(exchange, linked=False) == name
    assert choose(exchange, linked=True) == ("nvlink" if R > 1 else "local")


@pytest.mark.parametrize(
    "T, K, C, R, dtype, ring, all_to_all",
    [
        (16, 2, 64, 4, "bfloat16", 3 * 16 * (2 + 4), 3 * 16 * (2 + 4)),
        (16, 2, 8, 4, "bfloat16", 3 * 16 * (2 + 4), 3 * 8 * (2 + 4)),
        (16, 1, 64, 2, "bfloat16", 16 * (2 + 4), 16 * (2 + 2)),
        (16, 2, 64, 2, "float64", 16 * (8 + 8), 16 * (8 + 8)),
    ],
)
def test_bytes_that_a_rank_receives(T, K, C, R, dtype, ring, all_to_all):
    """Tokens of all other ranks as they are, and sums in float32, or in float64 of float64."""
    exchange = Exchange(num_tokens=T, top_k=K, capacity=C, ep_size=R, dtype=dtype, platform="cuda")
    with jax.enable_x64(dtype == "float64"):
        assert received(exchange) == {"ring": ring, "all_to_all": all_to_all}


def test_what_is_taken_in_place_of_nvlink():
    """One and the same, whatever the sizes are, so that it is said once."""
    taken = Unlinked("ring", "planted", {"ring": 8, "all_to_all": 12})
    assert taken == Unlinked("ring", "planted", {"ring": 16}) != Unlinked("ring", "other", {})
    assert "takes 'ring'" in str(taken) and str(taken).endswith("one host: planted")
    assert ": 'ring' 8, 'all_to_all' 12; not 'nvlink'" in str(taken)
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.name = "all_to_all"


@pytest.mark.parametrize(
    "T, K, R, moves",
    [(1, 1, 2, True), (1, 1, 1, False), (0, 1, 2, False), (1, 0, 2, False), (4, 2, 8, True)],
)
def test_what_moves_between_ranks(T, K, R, moves):
    assert Exchange(num_tokens=T, top_k=K, ep_size=R, platform="cpu").moves is moves


def test_an_exchange_of_which_only_the_platform_is_asked():
    """The smallest, which every transport can do that the platform has."""
    smallest = Exchange(platform="cpu")
    sizes = smallest.num_tokens, smallest.top_k, smallest.capacity, smallest.ep_size
    assert (*sizes, smallest.levels) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    "spec, sizes, axis, leading, outer",
    [
        (("ep",), (8,), ("ep",), ("ep",), ()),
        ((("dp", "ep"),), (8,), ("ep",), (("dp", "ep"),), ("dp",)),
        (("ep", ("fsdp", "dp")), (4, 6), ("ep",), ("ep", ("fsdp", "dp")), ("fsdp", "dp")),
        ((("fsdp", "dp", "ep"),), (24,), ("dp", "ep"), (("fsdp", "dp", "ep"),), ("fsdp",)),
        (("dp",), (8,), ("ep",), (("dp", "ep"),), ("dp",)),  # resharded
        (("dp",), (8,), ("manual",), ("dp",), ("dp",)),
        (("dp",), (8,), None, (None,), ()),
    ],
)
def test_ep_groups_are_parted_by_the_axes_of_tokens_that_are_not_ep(
    spec, sizes, axis, leading, outer
):
    plan = partition.plan_balance(query(((*spec, None),), ((*sizes, 3),), axis))
    choices = PartitionSpec(*leading, None)
    assert plan.operand_specs == (choices,)
    assert plan.result_specs == (choices, PartitionSpec(None, None))
    assert plan.options == {"outer": outer}


@pytest.mark.parametrize(
    "spec, shape, axis, want",
    [
        (("ep", None, "tp"), (8, 6, 10), ("ep",), ("ep", None, "tp")),
        (("ep", ("dp", "fsdp"), None), (8, 6, 10), ("ep",), ("ep", ("dp", "fsdp"), None)),
        (("ep", ("dp", "fsdp"), "tp"), (8, 4, 7), ("ep",), ("ep", "dp", None)),  # uneven
        ((("dp", "ep"), "tp"), (8, 10), ("dp", "ep"), (("dp", "ep"), "tp")),
        (("fsdp", "ep"), (12, 8), ("ep",), ("ep", None)),  # only EP splits E, and only E
        (("dp", "tp"), (8, 10), ("manual", "ep"), ("ep", "tp")),
        ((None, "tp"), (8, 10), ("manual",), (None, "tp")),
    ],
)
def test_slots_are_split_over_ep_and_the_rest_of_a_weight_as_it_is(spec, shape, axis, want):
    weights, expert = PartitionSpec(*want), PartitionSpec(None, None)
    for num_experts in (shape[0], 2 * shape[0]):  # without the copies, and with them
        plan = partition.plan_copies(
            query((spec, (None, None)), ((num_experts, *shape[1:]), (8, 2)), axis)
        )
        assert plan.operand_specs == (weights, expert)
        assert plan.result_specs == (weights,)

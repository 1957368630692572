"""The block's options: each alone where it can be seen, and all of them at once on meshes with tensor parallelism."""

import collections
import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases.covering import full
from cases.lowered import sums
from core.router import router_oracle
from expertmesh.core import Activation
from expertmesh.core.features import is_supported as core_is_supported
from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.quantization.recipe import RECIPES
from expertmesh.core.testing import relative_error
from expertmesh.ep import recv_capacity
from expertmesh.flax_moe import (
    REMAT_POLICIES,
    is_supported,
    moe,
    native_moe,
    param_shapes,
    param_specs,
)
from flax_moe.moe_oracle import (
    AUTO,
    EXPLICIT,
    GPT_OSS,
    MANY,
    Data,
    assert_result,
    make_config,
    make_data,
    make_mesh,
    place,
    run,
    value_and_gradients,
)

pytestmark = pytest.mark.default_jax


@pytest.mark.parametrize(
    "kind, tokens",
    [(EXPLICIT, PartitionSpec("fsdp")), full(AUTO, PartitionSpec(("fsdp", "ep")))],
    ids=["explicit, tokens not over ep", "resource"],
)
def test_all_options_on_three_axes(kind, tokens):
    """With tensor parallelism in the routed and the shared experts; what is laid out like x and the parameters."""
    config = make_config(**MANY)
    data = make_data(config, (8, 3, 16))
    roles = ("fsdp", "ep", "tp")
    resource = MeshResource(**{f"{role}_resource": role for role in roles})
    mesh = jax.make_mesh((2, 2, 2), roles, axis_types=(kind,) * 3)
    specs = param_specs(config, resource)
    params = {k: jax.device_put(w, NamedSharding(mesh, specs[k])) for k, w in data.params.items()}
    assert {name: specs[name] for name in ("shared_wi", "shared_wo")} == {
        "shared_wi": PartitionSpec("fsdp", None, "tp"),
        "shared_wo": PartitionSpec("tp", "fsdp"),
    }
    x, dy = jax.device_put((data.x, data.dy), NamedSharding(mesh, tokens))
    with contextlib.ExitStack() as stack:
        if kind == AUTO:
            stack.enter_context(global_shard_guard(resource))
        else:
            words = r"tokens should be .* as P\(\('fsdp', 'ep'\).*got x as P\('fsdp'"
            stack.enter_context(pytest.warns(UserWarning, match=words))
        program = jax.jit(value_and_gradients(moe, config)).lower(params, x, dy).compile()
    (_, output), gradients = program(params, x, dy)
    assert_result(output, gradients, run(data, config))
    gathered = {
        shape
        for found in collectives(program.as_text())
        if found.kind == "all-gather"
        for shape in found.shapes
    }
    hidden = {s for s in gathered if re.fullmatch(r"f32\[1,\d+,(2,)?(6|12)\]", s)}
    assert gathered and not hidden, "rows between the GEMMs stay where their columns are"
    like = [(output.y, x), (gradients[1], x)]
    for name in ("gate_kernel", "wi", "wo", "shared_wi", "shared_wo", "shared_gate"):
        like.append((gradients[0][name], params[name]))
    for got, want in like:
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim), (got.sharding, want)


ADVISED = PartitionSpec(("fsdp", "ep"), None, None)


SPLIT = dict(shard_exp_on_fsdp=True, ep_axis="ep")


@pytest.mark.parametrize(
    "sizes, batch, tokens, advised, changes",
    [
        ((2, 4), 16, ("ep",), ADVISED, {}),
        ((2, 4), 16, ("ep",), ADVISED, SPLIT),
        ((2, 4), 16, (), ADVISED, {}),
        ((2, 4), 16, None, ADVISED, {}),
        full((2, 4), 16, (None, None, "fsdp"), ADVISED, {}),
        ((2, 4), 16, (None, "ep"), PartitionSpec(None, ("fsdp", "ep"), None), {}),
        ((2, 4), 4, ("ep",), PartitionSpec("ep", "fsdp", None), {}),
        full((8, 1), 16, ("ep",), ADVISED, {}),
        ((8, 1), 16, ("fsdp",), None, {}),
        ((1, 8), 16, ("ep",), None, {}),
        ((2, 4), 16, (("fsdp", "ep"),), None, {}),
        ((2, 4), 16, ("ep", None, "fsdp"), None, {}),
        full((2, 4), 16, ("ep", None, "fsdp"), ADVISED, SPLIT),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:grouped_gemm. axis 'fsdp':RuntimeWarning")
def test_advice_leaves_no_axis_idle(sizes, batch, tokens, advised, changes):
    """x laid out as advised is warned of no more; y is like x, which is replicated if it has no layout (None)."""
    config = make_config(use_bias=False, **changes)
    x, mesh = make_data(config, (batch, 8, 16)).x, make_mesh(sizes, EXPLICIT)
    params = place(make_data(config), config, mesh).params

    def at(*spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def warned(x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            y = jax.eval_shape(lambda params, x: moe(params, x, config).y, params, x)
        assert y.sharding.mesh == mesh.abstract_mesh
        return y, [str(w.message) for w in caught if w.category is UserWarning]

    y, messages = warned(x if tokens is None else at(*tokens))
    assert y.sharding.spec == jax.typeof(at(*tokens or ())).sharding.spec
    assert bool(messages) == (advised is not None), messages
    assert all(f"as {advised}; got x as" in message for message in messages), messages
    if advised is not None:
        assert not warned(at(*advised))[1]


def chunk_of(t, seq, num_chunks):
    """The part of token t of [B, seq] tokens, split along the batch."""
    return (t // seq) % num_chunks


@pytest.mark.full
def test_chunks_drop_by_themselves_and_count():
    """All choices go to the first experts of one rank; each part has its own buffer of the capacity factor."""
    config = make_config(num_chunks=2, capacity_factor=1.0, num_experts=4)
    data = make_data(config, (8, 3, 16))
    gate = np.zeros_like(data.params["gate_kernel"])
    gate[0, :2] = 4, 2
    x = data.x.copy()
    x[..., 0] = 1
    params = {**data.params, "gate_kernel": gate + 1e-3 * np.arange(4, dtype=np.float32)}
    data = Data(params, x, data.dy)
    capacity = recv_capacity(4, 2, 12 // 2, 2, factor=1.0)  # two parts of 12 tokens on two ranks
    assert 12 <= capacity < 24
    place_in_part = {}
    for t in range(24):
        part = chunk_of(t, 3, 2)
        place_in_part[t] = sum(chunk_of(u, 3, 2) == part for u in range(t))

    def keep(t, k):
        return 12 * k + place_in_part[t] < capacity

    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(
        *place(data, config, make_mesh((1, 2), EXPLICIT))
    )
    dropped = 2 * (24 - capacity)
    assert_result(output, gradients, run(data, config, keep), num_dropped=dropped)


def temp_bytes(config, shape=(64, 8, 32), grad=False):
    data = make_data(config, shape)

    def forward(params, x, dy):
        return moe(params, x, config).y

    function = value_and_gradients(moe, config) if grad else forward
    # Code that is never run need not be optimized; its buffers are assigned before that.
    fast = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(function, compiler_options=fast).lower(*data).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory():
    """Parts of the tokens need a part of the buffers; without gradients less than with; within a bound by formula."""
    options = dict(num_experts=8, top_k=4, expert_dim=64, use_bias=False)
    whole, chunked = (temp_bytes(make_config(**options, num_chunks=n)) for n in (1, 8))
    assert chunked < 0.4 * whole, (chunked, whole)
    # Rows [C, D] in and out of the experts, [C, 2, F] between the GEMMs, [C, F] after the activation, and as much
    # again for copies that the reference GEMM pads.
    rows, bound = 512 * 4, 512 * 4 * (2 * 32 + 3 * 64) * 4 * 2
    assert rows * 32 * 4 < whole < bound, (whole, bound)
    trained = temp_bytes(make_config(**options), grad=True)
    lean = temp_bytes(make_config(**options, num_chunks=8, remat="recompute"), grad=True)
    assert whole < trained and lean < 0.5 * trained, (whole, lean, trained)


def exchanges(function, *operands):
    """How often the program exchanges rows, weights and choices over an axis."""
    count = collections.Counter()

    def visit(value):
        if isinstance(value, tuple | list):
            for part in value:
                visit(part)
        elif hasattr(value, "eqns"):
            for eqn in value.eqns:
                if eqn.primitive.name in ("all_gather", "all_to_all", "reduce_scatter"):
                    count[eqn.primitive.name] += 1
                visit(tuple(eqn.params.values()))
        elif hasattr(value, "jaxpr"):
            visit(value.jaxpr)

    visit(jax.make_jaxpr(function)(*operands))
    return count


NAMES = jax.checkpoint_policies.save_only_these_names
LEVANTER = NAMES(
    "grug_moe_dispatch_input",
    "grug_moe_expert_hidden",
    "grug_moe_dispatch_output",
    "grug_moe_output",
)


def under(policy):
    """The block under the user's own checkpoint."""

    def block(params, x, config):
        return jax.checkpoint(lambda p, x: moe(p, x, config), policy=policy)(params, x)

    return block


def test_what_is_exchanged_again():
    """Nothing under save_min and under a policy of levanter's names; the tokens under policies that keep less."""
    configs = {remat: make_config(transport="all_to_all", remat=remat) for remat in REMAT_POLICIES}
    config = configs["save_all"]
    placed = place(make_data(config), config, make_mesh((1, 2), EXPLICIT))
    functions = {remat: value_and_gradients(moe, c) for remat, c in configs.items()} | {
        "levanter": value_and_gradients(under(LEVANTER), config),
        "dots": value_and_gradients(under(jax.checkpoint_policies.dots_saveable), config),
    }
    counts = {name: exchanges(function, *placed) for name, function in functions.items()}
    assert counts["save_all"]["all_to_all"] == 4
    for name in ("save_min", "levanter"):
        assert counts[name] == counts["save_all"], name
    for name in ("recompute", "dots"):
        assert counts[name]["all_to_all"] > counts["save_all"]["all_to_all"], name


def test_gradients_under_policies_are_equal():
    config = make_config(num_experts=4)
    data = make_data(config, (3, 5, 16))

    def gradients(block):
        return value_and_gradients(block, config)(*data)[1]

    policies = (LEVANTER, jax.checkpoint_policies.nothing_saveable)
    want, *others = jax.jit(lambda: [gradients(b) for b in (moe, *map(under, policies))])()
    for got in others:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative_error(a, b) < 1e-6


def saved(config, policy, capsys):
    """What the forward keeps for the backward, in words."""
    data = make_data(config)

    def loss(params):
        return jnp.sum(moe(params, data.x, config).y * data.dy)

    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), data.params)
    return capsys.readouterr().out


def test_maxtexts_names_save_the_projections(capsys):
    config = make_config(use_bias=False)
    hidden, output = "f32[1,80,2,12]", "f32[1,80,16]"
    nothing = saved(config, jax.checkpoint_policies.nothing_saveable, capsys)
    assert hidden not in nothing and output not in nothing
    for name in ("mlpwi_0", "moe_mlpwi_0", "moe_mlpwi_1"):
        assert hidden in saved(config, NAMES(name), capsys), name
    for name in ("mlpwo", "moe_mlpwo"):  # which no backward reads
        assert output not in saved(make_config(), NAMES(name), capsys), name


@pytest.mark.parametrize("use_bias", [False, True])
def test_only_rows_and_their_first_products_are_kept(capsys, use_bias):
    """Neither activations nor expert outputs: the weights' gradient needs none."""
    config = make_config(use_bias=use_bias)
    kept = saved(config, jax.checkpoint_policies.everything_saveable, capsys)
    large = re.findall(r"f32\[1,80[,\d]*\]", kept)
    assert sorted(large) == ["f32[1,80,16]", "f32[1,80,2,12]", "f32[1,80]"]


@pytest.mark.parametrize(
    "options, rows",
    [
        ({}, {(1, 80, 16), (1, 80, 2, 12), (1, 80)}),
        (dict(remat="save_min"), {(1, 80, 16), (1, 80)}),
        (dict(remat="recompute"), set()),
        (dict(num_chunks=2), {(2, 1, 40, 16), (2, 1, 40, 2, 12), (2, 1, 40)}),
        # Where rows are the wider ones, tokens in their place.
        (dict(expert_dim=8), {(1, 40, 16), (1, 80, 2, 8), (1, 80)}),
        (dict(expert_dim=8, remat="save_min"), {(1, 80)}),
    ],
    ids=str,
)
def test_what_the_backward_holds(options, rows):
    """Of the experts' rows what was dispatched and the up projection, by default; parameters, tokens and the router's
    numbers besides.
    """
    config = make_config(use_bias=False, dtype=jnp.bfloat16, **options)
    data = make_data(config)

    def forward(params, x):
        return jax.vjp(lambda params, x: moe(params, x, config).y, params, x)[1]

    held = jax.tree.leaves(jax.eval_shape(forward, data.params, data.x))
    floats = {x.shape for x in held if jnp.issubdtype(x.dtype, jnp.floating)}
    assert rows <= floats
    logits_and_weights = {(8, 5, 8), (8, 5, 2)}
    assert floats - rows <= {w.shape for w in (*data.params.values(), data.x)} | logits_and_weights


def test_what_masked_tokens_hold_does_not_matter():
    """NaN in a masked token: its y and gradient are 0, and all else is what it is with a number there."""
    config = make_config(shared_expert_dim=20)
    data = make_data(config, (2, 5, 16))
    mask = np.random.default_rng(0).random((2, 5)) < 0.6

    def loss(params, x):
        out = moe(params, x, config, token_mask=jnp.asarray(mask))
        return jnp.sum(out.y * data.dy) + out.aux_loss + out.z_loss, out

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def run_with(value):
        return gradients(data.params, np.where(mask[..., None], data.x, np.float32(value)))

    poisoned, clean = run_with(np.nan), run_with(1.0)
    for a, b in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    (_, output), (_, d_x) = poisoned
    assert not np.asarray(output.y)[~mask].any() and not np.asarray(d_x)[~mask].any()
    assert (np.asarray(output.topk_idx)[~mask] == -1).all()


def test_balance_of_each_sequence_and_entropy():
    config = make_config(aux_loss_per_sequence=True, use_bias=False)
    data = make_data(config)
    plain = make_config(use_bias=False)
    out, native = jax.jit(lambda p, x: (moe(p, x, config), native_moe(p, x, plain)))(*data[:2])
    logits = data.x.astype(np.float64) @ data.params["gate_kernel"]
    idx, _ = router_oracle.route(logits, config.router)
    np.testing.assert_array_equal(out.topk_idx, idx)
    want = router_oracle.sequence_balance(logits, idx, config.aux_loss_coeff)
    assert relative_error(out.aux_loss, want) < 1e-5
    assert abs(want / router_oracle.balance(logits, idx, config.aux_loss_coeff) - 1) > 0.05
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1).mean()
    assert relative_error(out.entropy, entropy) < 1e-5
    assert relative_error(native.entropy, entropy) < 1e-5
    np.testing.assert_array_equal(native.topk_idx, idx)


def test_decoding_equals_the_whole():
    """Without gradients, one token at a time: the same outputs as of the whole sequence."""
    config = make_config(shared_expert_dim=20, use_bias=False)
    data = make_data(config, (3, 4, 16))
    step = jax.jit(lambda x: moe(data.params, x, config).y)
    whole = step(data.x)
    for t in range(4):
        assert relative_error(step(data.x[:, t]), whole[:, t]) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_sum_in_an_order_of_chance(dtype):
    """The same bits run after run: nothing in the program adds floating-point numbers by a scatter; with biases."""
    config = make_config(**MANY, dtype=jnp.dtype(dtype))
    text = jax.jit(value_and_gradients(moe, config)).lower(*make_data(config)).as_text()
    scatters = text.split('"stablehlo.scatter"')[1:]
    results = [re.search(r"\}\) : .* -> (.*)", part)[1] for part in scatters]
    assert results and not [found for found in results if re.search(r"[<x]b?f\d", found)], results


def test_shapes_beyond_two_billion_elements():
    """2^31 elements of rows and of weights, abstractly; routing counts rows in int32, so rows have a bound."""
    config = make_config(num_experts=256, top_k=8, expert_dim=4096, use_bias=False, alignment=128)
    shapes = param_shapes(8192, config)
    assert np.prod(shapes["wi"]) > 2**31
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    x = jax.ShapeDtypeStruct((128, 4096, 8192), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    (_, out), (d_params, d_x) = jax.eval_shape(value_and_gradients(moe, config), params, x, dy)
    assert out.y.shape == d_x.shape == x.shape and out.y.dtype == jnp.bfloat16
    assert {name: g.shape for name, g in d_params.items()} == shapes


def test_traced_once():
    """Two calls with equal types, and with an equal config that is another object, trace the block once."""
    traced = []
    config = make_config(**MANY)

    def block(params, x, config):
        traced.append(1)
        return moe(params, x, config).y

    jitted = jax.jit(block, static_argnums=2)
    for seed in range(2):
        data = make_data(config, seed=seed)
        jitted.trace(data.params, data.x, make_config(**MANY))
    assert len(traced) == 1


@pytest.mark.parametrize(
    "changes, spoil, words",
    [
        (dict(num_chunks=3), lambda p: p, ["num_chunks=3", "(8, 5)", "pad the batch"]),
        (
            dict(shared_expert_dim=20),
            lambda p: p | {"shared_wo": p["shared_wo"][:10]},
            ["shared_wo", "[S, D] = (20, 16)", "(10, 16)", "shared_expert_dim=20"],
        ),
        (
            dict(shared_expert_dim=20),
            lambda p: {k: w for k, w in p.items() if k != "shared_wi"},
            ["missing shared_wi"],
        ),
        (dict(), lambda p: p | {"shared_wi": p["wi"][0]}, ["shared_wi", "shared_expert_dim"]),
        (
            dict(activation=Activation(gated=False)),
            lambda p: p | {"wi": np.zeros((8, 16, 2, 12), np.float32)},
            ["wi", "[E, D, F] = (8, 16, 12)", "(8, 16, 2, 12)"],
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_errors(changes, spoil, words):
    config = make_config(**changes)
    data = make_data(config)
    with pytest.raises(ValueError) as info:
        moe(spoil(data.params), data.x, config)
    message = str(info.value)
    assert message.startswith("moe: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    "changes",
    [
        dict(shared_expert_dim=8),
        dict(activation=GPT_OSS),
        dict(aux_loss_per_sequence=True),
        dict(num_null_experts=1),
        dict(latent_dim=8),
    ],
    ids=str,
)
def test_the_baseline_refuses_what_it_lacks(changes):
    config = make_config(**changes)
    data = make_data(config)
    with pytest.raises(ValueError, match=f"native_moe: {next(iter(changes))} must.*use moe"):
        native_moe(data.params, data.x, config)


def test_recipes_are_supported_as_in_core():
    device = jax.devices("cpu")[0]
    for name in RECIPES:
        assert is_supported(name, device) == core_is_supported(name, device)
        assert f"{name} runs emulated" in is_supported(name, device)[1]


def test_what_is_supported():
    for feature in ("moe", "native_moe"):
        assert is_supported(feature) == (True, "")
    ok, reason = is_supported("native_ragged", jax.devices("cpu")[0])
    assert not ok and "ragged_all_to_all" in reason
    with pytest.raises(ValueError, match="feature must be one of moe, .*got feature='fp8'"):
        is_supported("fp8")


def test_parts_where_the_layout_is_not_known():
    """Over Auto axes without a MeshResource the sequence is split, since any axes may shard the batch; or an error."""
    config = make_config(num_chunks=2, use_bias=False)
    mesh = make_mesh((1, 2), AUTO)
    data = make_data(config, (2, 4, 16))
    params, x, _ = place(data, config, mesh)
    y = jax.jit(lambda params, x: moe(params, x, config).y)(params, x)
    assert relative_error(y, run(data, config).y) < 1e-5
    with pytest.raises(ValueError, match=r"num_chunks=2, tokens \(2, 3\) over \[2, 2\] shards"):
        jax.eval_shape(lambda params, x: moe(params, x, config), params, x[:, :3])


@pytest.mark.parametrize(
    "sizes, tokens",
    [((8, 1), ("fsdp", "ep")), full((1, 8), ("ep", "fsdp")), full((1, 8), ("fsdp", "ep"))],
    ids=str,
)
def test_a_shard_of_as_many_tokens_as_parts(sizes, tokens):
    """An axis of one device, which divides anything, stays with the tokens."""
    config = make_config(num_chunks=2)
    data, mesh = make_data(config, (16, 3, 16)), make_mesh(sizes, EXPLICIT)
    placed = place(data, config, mesh)
    layout = NamedSharding(mesh, PartitionSpec(tokens))
    placed = placed._replace(x=jax.device_put(data.x, layout), dy=jax.device_put(data.dy, layout))
    (_, output), gradients = jax.jit(value_and_gradients(moe, config))(*placed)
    assert_result(output, gradients, run(data, config))
    assert output.y.sharding.spec == PartitionSpec(tokens, None, None)


def test_parts_of_a_shard():
    """Inside the user's `shard_map` the tokens are one shard's: no axis of the mesh divides them further."""
    config = make_config(num_chunks=2, use_bias=False, ep_axis="ep")
    data, mesh = make_data(config, (16, 3, 16)), make_mesh((2, 4), AUTO)
    specs = param_specs(config)
    tokens = PartitionSpec(("fsdp", "ep"))
    block = jax.shard_map(
        lambda params, x: moe(params, x, config).y,
        mesh=mesh,
        in_specs=(specs, tokens),
        out_specs=tokens,
    )
    assert relative_error(jax.jit(block)(data.params, data.x), run(data, config).y) < 1e-5


def test_no_tokens_in_parts():
    config = make_config(**MANY)
    data = make_data(config, (0, 4, 16))
    out = jax.jit(lambda *a: moe(*a, config))(*place(data, config, make_mesh((1, 2), EXPLICIT))[:2])
    assert out.y.shape == (0, 4, 16) and int(out.num_dropped) == 0


@pytest.mark.parametrize("recipe, D", [(None, 128), full("fp8_block", 256)])
def test_what_devices_add_in_reduce_dtype(recipe, D):
    """The gradients of all expert weights, by what is lowered; the router's and everything else in float32."""
    config = make_config(
        expert_dim=128,
        shared_expert_dim=128,
        dtype=jnp.bfloat16,
        use_bias=False,
        reduce_dtype="bfloat16",
        recipe=recipe,
    )
    data = make_data(config, (8, 3, D))
    mesh = make_mesh((2, 4), EXPLICIT)
    program = jax.jit(value_and_gradients(moe, config)).lower(*place(data, config, mesh))
    added = sums(program.as_text())
    narrow = sorted(kind for kind in added if kind[1].endswith("bf16"))
    # 2 experts a device, F of 128; shared experts' gradients are first added over ep, which they do not split.
    half = D // 2
    assert narrow == sorted(
        [
            *[("all_reduce", f"128x{half}xbf16"), ("all_reduce", f"{half}x2x128xbf16")],
            *[("reduce_scatter", f"128x{half}xbf16"), ("reduce_scatter", f"2x128x{half}xbf16")],
            *[("reduce_scatter", f"{n}{half}x2x128xbf16") for n in ("", "2x")],
        ]
    )
    assert ("all_reduce", f"{D}x8xf32") in added  # the router's

"""The parameter tree: shapes, initial spread, layout at rest, split and merged projections."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from expertmesh.core import Activation, TensorFormat, quantize
from expertmesh.core.linear.adapted import Adapted
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.flax_moe import (
    LogicalAxes,
    init_params,
    merge_wi,
    moe,
    param_shapes,
    param_specs,
    split_wi,
)
from expertmesh.flax_moe.params import (
    BIASES,
    EXPERTS,
    check_params,
    check_part,
    gate_part,
    whole_params,
    whole_specs,
)
from flax_moe.moe_oracle import make_config, make_data

FP8 = TensorFormat(dtype="float8_e4m3fn")

CONFIG = make_config()
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")


def test_tree():
    config = make_config(param_dtype=jnp.bfloat16)
    params = init_params(jax.random.key(0), 16, config)
    shapes = {
        "gate_kernel": (16, 8),
        "wi": (8, 16, 2, 12),
        "wo": (8, 12, 16),
        "wi_bias": (8, 2, 12),
        "wo_bias": (8, 16),
    }
    assert {name: w.shape for name, w in params.items()} == shapes == param_shapes(16, config)
    assert {w.dtype for w in params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert list(param_shapes(16, make_config(use_bias=False))) == ["gate_kernel", "wi", "wo"]


def test_tree_of_a_gate_with_a_bias():
    """Zeros at first, on every device; a tree that has it needs no option, and a bias alone is none."""
    config = make_config(use_bias=False, use_gate_bias=True)
    params = init_params(jax.random.key(0), 16, config)
    assert list(params) == ["gate_kernel", "wi", "wo", "gate_bias"] == list(param_specs(config))
    assert params["gate_bias"].shape == (8,) and not np.any(params["gate_bias"])
    assert param_specs(config, RESOURCE)["gate_bias"] == P(None)
    assert LogicalAxes().of("gate_bias") == (None,)
    plain = make_config(use_bias=False)
    for taken in (config, plain):
        check_params("moe", params, 16, taken, 8)
    for tree, taken, words in (
        (without(params, "gate_bias"), config, "missing gate_bias; .*use_gate_bias"),
        (without(params, "gate_kernel"), plain, "missing gate_kernel"),
        (params | {"gate_bias": np.zeros(4)}, plain, r"gate_bias must be \[E\] = \(8,\)"),
    ):
        for check in (partial(check_params, num_experts=8), partial(gate_part, needed=False)):
            with pytest.raises(ValueError, match=words):
                check("moe", tree, 16, taken)


@pytest.mark.parametrize("num_experts", [4, 64])
def test_initial_spread_is_that_of_one_expert(num_experts):
    """Standard deviation 1 / sqrt(fan-in of one expert), whatever the number of experts."""
    config = make_config(
        num_experts=num_experts, expert_dim=64, shared_expert_dim=128, shared_expert_gate=True
    )
    params = init_params(jax.random.key(0), 256, config)
    fan_ins = {"gate_kernel": 256, "wi": 256, "wo": 64, "shared_wi": 256, "shared_wo": 128}
    for name, fan_in in (fan_ins | {"shared_gate": 256}).items():
        w = np.asarray(params[name], np.float64)
        assert abs(w.std() * fan_in**0.5 - 1) < max(0.05, 2 * w.size**-0.5), name
        assert abs(w.mean()) < 3 * w.std() / w.size**0.5 + 1e-3, name
    for expert in range(num_experts):
        assert abs(np.asarray(params["wi"][expert]).std() * 16 - 1) < 0.05
    assert not np.any(params["wi_bias"]) and not np.any(params["wo_bias"])


def test_keys_and_experts_are_independent():
    config = make_config()
    params = init_params(jax.random.key(0), 16, config)
    again = init_params(jax.random.key(0), 16, config)
    other = init_params(jax.random.key(1), 16, config)
    np.testing.assert_array_equal(params["wi"], again["wi"])
    assert np.abs(params["wi"] - other["wi"]).min() > 0
    assert np.abs(params["wi"][0] - params["wi"][1]).min() > 0
    assert abs(np.corrcoef(params["wi"].ravel()[:512], params["wo"].ravel()[:512])[0, 1]) < 0.2


def test_specs():
    config = make_config()
    want = {
        "gate_kernel": P(None, None),
        "wi": P("ep", "fsdp", None, "tp"),
        "wo": P("ep", "tp", "fsdp"),
        "wi_bias": P("ep", None, "tp"),
        "wo_bias": P("ep", None),
    }
    assert param_specs(config, RESOURCE) == want
    with global_shard_guard(RESOURCE):
        assert param_specs(config) == want
    assert param_specs(make_config(ep_axis=("a", "b")), RESOURCE)["wo"] == P(
        ("a", "b"), "tp", "fsdp"
    )
    assert param_specs(config)["wi"] == P(None, None, None, None)
    assert param_specs(config, MeshResource(tpsp_resource="t"))["wi"] == P(None, None, None, "t")
    assert "wi_bias" not in param_specs(make_config(use_bias=False), RESOURCE)


def test_specs_of_experts_that_fsdp_splits():
    config = make_config(shard_exp_on_fsdp=True, shared_expert_dim=24)
    assert param_specs(config, RESOURCE) == {
        "gate_kernel": P(None, None),
        "wi": P(("ep", "fsdp"), None, None, "tp"),
        "wo": P(("ep", "fsdp"), "tp", None),
        "shared_wi": P("fsdp", None, "tp"),
        "shared_wo": P("tp", "fsdp"),
        "wi_bias": P("ep", None, "tp"),
        "wo_bias": P("ep", None),
    }
    assert param_specs(config, MeshResource(fsdp_resource=("a", "b")))["wo"] == P(
        ("a", "b"), None, None
    )


def test_tree_with_shared_experts_and_without_a_gate():
    config = make_config(shared_expert_dim=24, activation=Activation(gated=False))
    assert param_shapes(16, config) == {
        "gate_kernel": (16, 8),
        "wi": (8, 16, 12),
        "wo": (8, 12, 16),
        "shared_wi": (16, 24),
        "shared_wo": (24, 16),
        "wi_bias": (8, 12),
        "wo_bias": (8, 16),
    }
    assert init_params(jax.random.key(0), 16, config)["wi"].shape == (8, 16, 12)
    specs = param_specs(config, RESOURCE)
    assert specs["wi"] == P("ep", "fsdp", "tp") and specs["wi_bias"] == P("ep", "tp")
    assert specs["shared_wi"] == P("fsdp", "tp") and specs["shared_wo"] == P("tp", "fsdp")
    assert LogicalAxes().of("shared_wi") == ("embed", None, "mlp")
    assert LogicalAxes().of("wi", gated=False) == ("exp", "embed", "mlp")


def test_logical_axes():
    axes = LogicalAxes(embed="d", expert="e", mlp="f")
    assert axes.of("wi") == ("e", "d", None, "f")
    assert axes.of("wo") == ("e", "f", "d")
    assert axes.of("gate_kernel") == (None, None)


def test_split_and_merge():
    config = make_config()
    data = make_data(config)
    split = split_wi(data.params)
    assert set(split) == {"gate_kernel", "wi_0", "wi_1", "wi_0_bias", "wi_1_bias", "wo", "wo_bias"}
    np.testing.assert_array_equal(split["wi_0"], data.params["wi"][:, :, 0])
    np.testing.assert_array_equal(split["wi_1_bias"], data.params["wi_bias"][:, 1])
    merged = merge_wi(split)
    assert set(merged) == set(data.params)
    for name, w in data.params.items():
        np.testing.assert_array_equal(merged[name], w)
    swapped = merge_wi(split | {"wi_0": split["wi_1"], "wi_1": split["wi_0"]})
    assert np.abs(moe(swapped, data.x, config).y - moe(merged, data.x, config).y).max() > 0.1
    shared = make_data(make_config(shared_expert_dim=20)).params
    assert {"shared_wi_0", "shared_wi_1"} < set(split_wi(shared))
    np.testing.assert_array_equal(merge_wi(split_wi(shared))["shared_wi"], shared["shared_wi"])
    without = {k: w for k, w in data.params.items() if "bias" not in k}
    assert set(merge_wi(split_wi(without))) == set(without)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda p: merge_wi(p), ["merge_wi", "missing wi_0, wi_1"]),
        (lambda p: split_wi(split_wi(p)), ["split_wi", "missing wi"]),
        (lambda p: split_wi(p | {"wi": p["wo"]}), ["split_wi", "(8, 12, 16)", "without a gate"]),
        (
            lambda p: merge_wi({k: w for k, w in split_wi(p).items() if k != "wi_1_bias"}),
            ["merge_wi", "missing wi_1_bias"],
        ),
        (lambda p: merge_wi(split_wi(p) | {"wi": p["wi"]}), ["got also wi_0, wi_1", "remove"]),
        (
            lambda p: merge_wi(split_wi(p) | {"wi_1": p["wo"]}),
            ["merge_wi", "(8, 16, 12)", "(8, 12, 16)"],
        ),
    ],
)
def test_split_and_merge_errors(call, words):
    with pytest.raises(ValueError) as info:
        call(make_data(make_config()).params)
    assert all(word in str(info.value) for word in words), str(info.value)


def without(params, *names):
    return {name: w for name, w in params.items() if name not in names}


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("num_held", [8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_trees_that_are_taken(use_bias, num_held, dtype):
    """Those of a shard hold fewer experts; biases that are there count, whatever the config says."""
    params = init_params(jax.random.key(0), 16, make_config())
    held = {n: w if n == "gate_kernel" else w[:num_held] for n, w in params.items()}
    held = {name: w.astype(dtype) for name, w in held.items()}
    check_params("moe", held, 16, make_config(use_bias=use_bias), num_held)


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (lambda p: list(p), TypeError, "params must be a mapping of names to arrays; got list"),
        (lambda p: without(p, "wo"), ValueError, "missing wo"),
        (lambda p: p | {"wi_0": p["wi"]}, ValueError, "got also wi_0"),
        (lambda p: p | {"shared_wi": p["wi"]}, ValueError, "got also shared_wi"),
        (lambda p: without(p, "wi_bias"), ValueError, "missing wi_bias"),
        (lambda p: without(p, "wi_bias", "wo_bias"), ValueError, "missing wi_bias, wo_bias"),
        (
            lambda p: p | {"wo": [[1.0]]},
            TypeError,
            "wo must be an array of floats of at least 16 bits; got a list",
        ),
        (lambda p: p | {"wo": types.SimpleNamespace(shape=(8, 12, 16))}, TypeError, "an array"),
        (lambda p: p | {"wo": types.SimpleNamespace(dtype=jnp.float32)}, TypeError, "an array"),
        (
            lambda p: p | {"wo": p["wo"].astype(int)},
            TypeError,
            "wo must be an array of floats of at least 16 bits; got dtype=int32",
        ),
        (
            lambda p: p | {"wo": p["wo"].astype("float8_e4m3fn")},
            TypeError,
            "of at least 16 bits; got dtype=float8",
        ),
        (lambda p: p | {"wo": quantize(p["wo"], FP8)}, TypeError, "wo must be an array of floats"),
        (lambda p: p | {"wi": p["wo"]}, ValueError, "wi must be [E, D, 2, F] = (8, 16, 2, 12)"),
        (lambda p: p | {"wo_bias": p["wo"]}, ValueError, "wo_bias must be [E, D] = (8, 16)"),
    ],
)
def test_trees_that_do_not_fit(change, kind, words):
    with pytest.raises(kind) as info:
        check_params("moe", change(init_params(jax.random.key(0), 16, CONFIG)), 16, CONFIG, 8)
    assert words in str(info.value) and str(info.value).startswith("moe: ")

    if "also" not in words:  # a part is taken from a tree that has others
        with pytest.raises(kind) as of_part:
            part_of(change(init_params(jax.random.key(0), 16, CONFIG)), CONFIG)
        assert words in str(of_part.value) and str(of_part.value).startswith("moe: ")


def part_of(params, config, names=EXPERTS + BIASES):
    return check_part("moe", params, names, 16, config, 8)


def test_a_part_is_checked_and_taken_alone():
    params = init_params(jax.random.key(0), 16, CONFIG)
    for names in (EXPERTS + BIASES, EXPERTS, ("gate_kernel",)):
        others = {name: None for name in params if name not in names}
        assert part_of(params | others, CONFIG, names) == {name: params[name] for name in names}
    plain = without(params, *BIASES)
    assert set(part_of(plain, make_config(use_bias=False))) == set(EXPERTS)


def test_one_bias_alone_does_not_fit():
    config = make_config(use_bias=False)
    params = init_params(jax.random.key(0), 16, config)
    check_params("moe", params, 16, config, 8)
    params = without(init_params(jax.random.key(0), 16, CONFIG), "wi_bias")
    with pytest.raises(ValueError, match="missing wi_bias"):
        check_params("moe", params, 16, config, 8)


SEPARATE = dict(separate_wi=True, shared_expert_dim=24)


def test_a_tree_of_separate_projections():
    """Shapes and layouts are those of the whole parameters without the dimension of 2, the spread is the same."""
    config = make_config(**SEPARATE)
    params, specs = init_params(jax.random.key(0), 256, config), param_specs(config, RESOURCE)
    whole = make_config(shared_expert_dim=24)
    assert list(params) == list(specs)
    assert set(params) == set(split_wi(init_params(jax.random.key(0), 256, whole)))
    for halves in (("wi_0", "wi_1"), ("shared_wi_0", "shared_wi_1"), ("wi_0_bias", "wi_1_bias")):
        name = halves[0].replace("_0", "")
        entries = list(param_specs(whole, RESOURCE)[name])
        entries.pop(-2)
        assert {specs[half] for half in halves} == {P(*entries)}
    merged = merge_wi(params)
    assert {name: w.shape for name, w in merged.items()} == param_shapes(256, whole)
    assert abs(np.asarray(params["wi_1"]).std() * 16 - 1) < 0.05
    assert not np.any(params["wi_0_bias"])
    split = param_specs(make_config(**SEPARATE, shard_exp_on_fsdp=True), RESOURCE)
    assert split["wi_0"] == P(("ep", "fsdp"), None, "tp")
    assert LogicalAxes().of("wi_1") == ("exp", "embed", "mlp")


def test_a_tree_at_a_latent_width():
    config = make_config(latent_dim=64, expert_dim=16)
    params, specs = init_params(jax.random.key(0), 256, config), param_specs(config, RESOURCE)
    assert specs["latent_down"] == P("fsdp", None) and specs["latent_up"] == P(None, "fsdp")
    assert specs["wi"] == P("ep", "fsdp", None, "tp")
    assert params["wi"].shape == (8, 64, 2, 16) and params["wo_bias"].shape == (8, 64)
    for name, fan_in in {"latent_down": 256, "latent_up": 64, "wi": 64, "wo": 16}.items():
        assert abs(np.asarray(params[name]).std() * fan_in**0.5 - 1) < 0.05, name


def test_halves_are_put_together_where_asked():
    config = make_config(**SEPARATE)
    params = init_params(jax.random.key(0), 16, config)
    assert whole_params("moe", params, ()).keys() == {"gate_kernel", "wo", "wo_bias", "shared_wo"}
    whole = whole_params("moe", params, ("wi",))
    np.testing.assert_array_equal(whole["wi"][:, :, 1], params["wi_1"])
    assert not {"wi_0", "wi_1", "shared_wi"} & whole.keys()
    with pytest.raises(TypeError, match="moe: wi_1 must be an array"):
        whole_params("moe", params | {"wi_1": "none"})
    together = make_config(**SEPARATE | dict(separate_wi=False))
    with global_shard_guard(RESOURCE):
        assert whole_specs(config) == param_specs(together)


def test_a_router_outside_needs_no_gate():
    config = make_config(use_gate_bias=True)
    params = init_params(jax.random.key(0), 16, config)
    outside = without(without(params, "gate_kernel"), "gate_bias")
    gate = partial(gate_part, "stages.route", model_dim=16)
    assert gate(params=outside, config=config, needed=False) == {}
    for taken in (config, CONFIG):
        with pytest.raises(ValueError, match="missing gate_kernel; use init_params, or pass `log"):
            gate(params=outside, config=taken, needed=True)
        with pytest.raises(ValueError, match="missing gate_kernel"):
            check_params("moe", outside, 16, taken, 8)
    with pytest.raises(TypeError, match="params must be a mapping"):
        gate(params=[*params], config=config, needed=True)
    with pytest.raises(TypeError, match="gate_kernel must be"):
        gate(params=params | {"gate_kernel": np.zeros((16, 8), int)}, config=config, needed=True)


def test_an_adapted_weight_is_no_array():
    params = init_params(jax.random.key(0), 16, CONFIG)
    params["wi"] = Adapted(params["wi"], None, None)
    with pytest.raises(TypeError, match="moe: wi must be an array; got an Adapted; merge_lora"):
        check_params("moe", params, 16, CONFIG, 8)


def test_vectors_alone_are_drawn_within_bounds():
    """As Flax draws them: of what is truncated nothing is beyond 2.3 standard deviations."""
    config = make_config(shared_expert_dim=64, shared_expert_gate=True)
    params = init_params(jax.random.key(0), 4096, config)
    for name in ("shared_gate", "gate_kernel", "wi"):
        w = np.asarray(params[name])
        assert (np.abs(w).max() < 2.3 * w.std()) == (name == "shared_gate"), name


DRAWN = dict(shared_expert_dim=24, shared_expert_gate=True)


@pytest.mark.parametrize("activation", ["silu", Activation(gated=False)], ids=str)
def test_kernel_init_draws_each_matrix_by_itself(activation):
    """Its shapes are those of dense layers; the numbers are those of calls by keys of their own."""
    shapes = []

    def kernel_init(key, shape, dtype):
        shapes.append(shape)
        return jax.random.uniform(key, shape, dtype)

    config = make_config(activation=activation, param_dtype=jnp.bfloat16, **DRAWN)
    key = jax.random.key(0)
    params = init_params(key, 16, config, kernel_init=kernel_init)
    assert set(shapes) == {(16, 8), (16, 12), (12, 16), (16, 24), (24, 16), (16, 1)}
    assert {name: w.shape for name, w in params.items()} == param_shapes(16, config)
    assert {w.dtype for w in params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert not np.any(params["wi_bias"]) and not np.any(params["wo_bias"])
    keys = jax.random.split(jax.random.split(key, len(params))[1], 8 * len(params["wi"].shape[2:]))
    first, second = (jax.random.uniform(k, (16, 12), jnp.bfloat16) for k in keys[:2])
    np.testing.assert_array_equal(params["wi"].reshape(8, 16, -1, 12)[0, :, 0], first)
    after = params["wi"][0, :, 1] if config.act.gated else params["wi"][1]
    np.testing.assert_array_equal(after, second)


@pytest.mark.parametrize(
    "kernel_init, kind, words",
    [
        (0.02, TypeError, "kernel_init must be a function of key, shape and dtype; got float"),
        (lambda key, shape, dtype: jnp.zeros(shape[::-1], dtype), ValueError, "that it is given"),
        (lambda key, shape, dtype: jnp.zeros(shape, jnp.float16), ValueError, "that it is given"),
        (lambda key, shape, dtype: [0.0], ValueError, "a list; name dimensions by logical_axes"),
    ],
)
def test_what_no_kernel_init_may_be(kernel_init, kind, words):
    with pytest.raises(kind, match=words):
        init_params(jax.random.key(0), 16, CONFIG, kernel_init=kernel_init)

"""The parameter tree of a MoE block: shapes, initial values, layout, and conversion from split projections.

    gate_kernel [D, E]          wi [E, D, 2, F] (0 gate, 1 up)      wo [E, F, D]
    optional, both or none:     wi_bias [E, 2, F]                   wo_bias [E, D]
    with shared experts:        shared_wi [D, 2, S]                 shared_wo [S, D]
    gated ones:                 shared_gate [D]
    at a latent width:          latent_down [D, L]                  latent_up [L, D]
                                wi [E, L, 2, F]                     wo [E, F, L], wo_bias [E, L]
    with Z null experts:        gate_kernel [D, E + Z]
    optional, of the gate:      gate_bias [E]

A block whose router is outside has neither `gate_kernel` nor `gate_bias`.

The gate and up projections sit beside each other in `wi`, so that F can be split without parting a pair. Without a gate
in the activation there is no dimension of 2. A tree may have them apart, `wi_0` and `wi_1` [E, D, F], and the others
with a 2 likewise: the block puts them together where it is called.

Dimension key: D model width, E experts, F expert width, S width of the shared experts, L latent width, Z
null experts.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec

from expertmesh.core.linear.adapted import Adapted, check_weights
from expertmesh.core.mesh import MeshResource, current_resource
from expertmesh.core.operands import FLOATS, as_counts, check_arrays
from expertmesh.core.specs import merge_dim
from expertmesh.flax_moe.config import MoEConfig

__all__ = [
    "BIASES",
    "EXPERTS",
    "GATE",
    "GATE_BIAS",
    "LATENT",
    "LAYERS",
    "SHARED",
    "SHARED_GATE",
    "LogicalAxes",
    "Params",
    "check_names",
    "check_params",
    "check_part",
    "check_shapes",
    "gate_part",
    "init_params",
    "initializers",
    "merge_wi",
    "param_names",
    "param_shapes",
    "param_specs",
    "split_wi",
    "whole_params",
    "whole_specs",
]

Params = Mapping[str, jax.Array]
WEIGHTS = dataclasses.replace(
    FLOATS, remedy="cast it to config.param_dtype, and quantize by config.recipe"
)

GATE = ("gate_kernel",)
GATE_BIAS = ("gate_bias",)
EXPERTS = ("wi", "wo")
BIASES = ("wi_bias", "wo_bias")
SHARED = ("shared_wi", "shared_wo")
SHARED_GATE = ("shared_gate",)
LATENT = ("latent_down", "latent_up")
LAYERS = EXPERTS + SHARED + LATENT  # what a recipe quantizes, and an adapter adapts
# A dimension in lower case is never split.
_DIMS = {
    "gate_kernel": "d e",
    "gate_bias": "e",
    "wi": "E D 2 F",
    "wo": "E F D",
    "shared_wi": "D 2 S",
    "shared_wo": "S D",
    "shared_gate": "d",
    "latent_down": "D l",
    "latent_up": "l D",
    "wi_bias": "E 2 F",
    "wo_bias": "E d",
}
# The two halves of a whole parameter, and the dimension that they are stacked along.
_PAIRS = {
    "wi": (("wi_0", "wi_1"), 2),
    "shared_wi": (("shared_wi_0", "shared_wi_1"), 1),
    "wi_bias": (("wi_0_bias", "wi_1_bias"), 1),
}
_WHOLE = {half: name for name, (pair, _) in _PAIRS.items() for half in pair}
_DIMS |= {half: _DIMS[name].replace(" 2", "") for half, name in _WHOLE.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicalAxes:
    """Names of the parameters' dimensions, to be mapped to mesh axes by a framework's logical axis rules.

    Attributes:
      embed: D of the weights.
      expert: E of everything but the gate.
      mlp: F, and S of the shared experts.

    The gate and its bias have no names: every device routes its own tokens, so it needs all of both. D of a bias has no
    name either.
    """

    embed: str | None = "embed"
    expert: str | None = "exp"
    mlp: str | None = "mlp"

    def of(self, name: str, *, gated: bool = True) -> tuple[str | None, ...]:
        """One name (or None) per dimension of the parameter `name` of a block whose activation is gated or not."""
        return _placed(name, gated, embed=self.embed, expert=self.expert, mlp=self.mlp)


def _dims(name: str, gated: bool) -> list[str]:
    return [dim for dim in _DIMS[name].split() if gated or dim != "2"]


def _placed(name: str, gated: bool, *, embed: Any, expert: Any, mlp: Any) -> tuple[Any, ...]:
    """What stands for each dimension of a parameter."""
    places = {"D": embed, "E": expert, "F": mlp, "S": mlp}
    return tuple(places.get(dim) for dim in _dims(name, gated))


def param_names(config: MoEConfig) -> tuple[str, ...]:
    """The names of the tree, in its order."""
    names = _whole_names(config)
    if not config.separate_wi:
        return names
    return tuple(part for name in names for part in _PAIRS.get(name, ((name,), 0))[0])


def _whole_names(config: MoEConfig) -> tuple[str, ...]:
    """Those of the tree whose gate and up projections are together."""
    shared = config.shared_expert_dim is not None
    gated = SHARED_GATE * config.shared_expert_gate
    latent = LATENT * (config.latent_dim is not None)
    gate, gate_bias = GATE * config.use_gate, GATE_BIAS * config.use_gate_bias
    return gate + EXPERTS + SHARED * shared + gated + latent + BIASES * config.use_bias + gate_bias


def param_shapes(model_dim: int, config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter, in the order of the tree."""
    MoEConfig.check("param_shapes", config=config)
    (model_dim,) = as_counts("param_shapes", model_dim=model_dim)
    shapes = _shapes(model_dim, config, config.num_experts)
    return {name: shapes[name] for name in param_names(config)}


def _shapes(model_dim: int, config: MoEConfig, num_held: int) -> dict[str, tuple[int, ...]]:
    """With `num_held` experts in the arrays; the gate's are always those of the config."""
    sizes = {"D": model_dim, "d": model_dim, "E": num_held, "e": config.num_candidates, "2": 2}
    sizes |= {"F": config.expert_dim, "S": config.shared_expert_dim or 0}
    sizes["l"] = sizes["L"] = model_dim if config.latent_dim is None else config.latent_dim
    return {name: tuple(sizes[dim] for dim in _layout(name, config)) for name in _DIMS}


def _layout(name: str, config: MoEConfig) -> list[str]:
    """The dimensions of a parameter: L in place of D for experts at a latent width."""
    dims = _dims(name, config.act.gated)
    if config.latent_dim is None or _WHOLE.get(name, name) not in EXPERTS + BIASES:
        return dims
    return ["L" if dim in "Dd" else dim for dim in dims]


_Init = Callable[..., jax.Array]


def initializers(config: MoEConfig, kernel_init: Initializer | None = None) -> dict[str, _Init]:
    """`init(key, shape, dtype)` of each parameter: variance 1 / fan-in of one expert; zeros for biases.

    The fan-in is the size that a GEMM contracts: D of `gate_kernel`, `shared_wi`, `shared_gate` and `latent_down`, D
    or L of `wi`, L of `latent_up`, F of `wo`, S of `shared_wo`. The expert dimension is a batch dimension.

    Args:
      config: see MoEConfig.
      kernel_init: draws the weights instead; see `init_params`.

    Raises:
      TypeError: a `kernel_init` that cannot be called.
    """
    if kernel_init is not None and not callable(kernel_init):
        raise TypeError(
            "initializers: kernel_init must be a function of key, shape and dtype; "
            f"got {type(kernel_init).__name__}; pass for example jax.nn.initializers.lecun_normal()"
        )
    return {name: _initializer(name, config.act.gated, kernel_init) for name in param_names(config)}


def _initializer(name: str, gated: bool, kernel_init: Initializer | None) -> _Init:
    if _WHOLE.get(name, name) in BIASES + GATE_BIAS:
        return jax.nn.initializers.zeros
    dims = _dims(name, gated)
    if kernel_init is not None or len(dims) == 1:
        return _of_matrices(kernel_init or jax.nn.initializers.lecun_normal(), dims)
    batch = 1 if dims[0] == "E" else 0
    return jax.nn.initializers.variance_scaling(
        1.0,
        "fan_in",
        "normal",
        in_axis=batch,
        out_axis=tuple(range(batch + 1, len(dims))),
        batch_axis=tuple(range(batch)),
    )


def _of_matrices(init: Initializer, dims: Sequence[str]) -> _Init:
    """`init` of each [in, out] matrix of a parameter by itself; a vector is a matrix with one column."""
    apart = [i for i, dim in enumerate(dims) if dim in "E2"]

    def draw(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        matrix = [size for i, size in enumerate(shape) if i not in apart]
        keys = jax.random.split(key, prod(shape[i] for i in apart))
        drawn = jax.vmap(partial(_drawn_matrix, init, (*matrix, 1)[:2], dtype))(keys)
        return jnp.moveaxis(
            drawn.reshape(*(shape[i] for i in apart), *matrix), range(len(apart)), apart
        )

    return draw


def _drawn_matrix(
    init: Initializer, shape: tuple[int, ...], dtype: Any, key: jax.Array
) -> jax.Array:
    drawn = init(key, shape, dtype)
    got = getattr(drawn, "shape", None), getattr(drawn, "dtype", None)
    if got != (shape, dtype):
        raise ValueError(
            f"kernel_init: it must return an array of the shape and dtype that it is given; got {got} for "
            f"{shape, dtype}, a {type(drawn).__name__}; name dimensions by logical_axes, not by a wrapped initializer"
        )
    return drawn


def init_params(
    key: jax.Array, model_dim: int, config: MoEConfig, *, kernel_init: Initializer | None = None
) -> dict[str, jax.Array]:
    """Parameters drawn from `key`, in `config.param_dtype`.

    Args:
      key: a JAX PRNG key.
      model_dim: D.
      config: see MoEConfig.
      kernel_init: `kernel_init(key, (in, out), dtype)` draws each matrix by itself, with its own key: of each expert,
        of the gate and up projections, of the router. So any of `jax.nn.initializers` sees the fan-in and fan-out of a
        dense layer. None: normal numbers of variance 1 / in.

    Biases are zeros.

    Raises:
      TypeError: a `kernel_init` that cannot be called.
      ValueError: it returns another shape or dtype than it is given.
    """
    MoEConfig.check("init_params", config=config)
    shapes, init = param_shapes(model_dim, config), initializers(config, kernel_init)
    keys = keys_of(key, shapes)
    return {
        name: init[name](keys[name], shape, config.param_dtype) for name, shape in shapes.items()
    }


def keys_of(key: jax.Array, names: Collection[str]) -> dict[str, jax.Array]:
    """A key of its own for each name, in their order."""
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))


def param_specs(
    config: MoEConfig, resource: MeshResource | None = None
) -> dict[str, PartitionSpec]:
    """Where each parameter lives at rest: experts over ep, D over fsdp, F and S over tp; the gate is replicated.

    Args:
      config: its `ep_axis`, if given, takes precedence over the resource's. Under `shard_exp_on_fsdp` E of `wi` and
        `wo` is over (ep, fsdp), and their D is whole.
      resource: names the mesh axes; None: the resource in context. Without one only `ep_axis` is used.

    Returns:
      A PartitionSpec with one entry per dimension, for each parameter.

    The weight is gathered over fsdp for use, and its gradient is scattered back, so no GEMM contracts a dimension that
    fsdp splits. tp splits `wi` by columns and `wo` by rows.
    """
    MoEConfig.check("param_specs", config=config)
    return _specs(param_names(config), config, resource)


def whole_specs(config: MoEConfig) -> dict[str, PartitionSpec]:
    """`param_specs` of the tree whose gate and up projections are together."""
    return _specs(_whole_names(config), config, None)


def _specs(
    names: Collection[str], config: MoEConfig, resource: MeshResource | None
) -> dict[str, PartitionSpec]:
    resource = resource or current_resource() or MeshResource()
    expert = config.ep_axis or resource.entry("experts")
    fsdp, tp = resource.entry("fsdp"), resource.entry("tp")
    places = {name: dict(embed=fsdp, expert=expert, mlp=tp) for name in names}
    if config.shard_exp_on_fsdp:
        split = dict(embed=None, expert=merge_dim(expert, fsdp), mlp=tp)
        places |= {name: split for name in names if _WHOLE.get(name, name) in EXPERTS}
    return {
        name: PartitionSpec(*_placed(name, config.act.gated, **place))
        for name, place in places.items()
    }


def split_wi(params: Params) -> dict[str, jax.Array]:
    """The tree with `wi` [E, D, 2, F] as `wi_0` and `wi_1` [E, D, F] (gate, up); `wi_bias` likewise.

    The shared experts' `shared_wi` [D, 2, S] as `shared_wi_0` and `shared_wi_1`.

    Raises:
      ValueError: there is no `wi`, or it is that of an activation without a gate.
    """
    _require("split_wi", params, ("wi",), "pass a tree of init_params")
    if params["wi"].ndim != 4:
        raise ValueError(
            f"split_wi: wi must be [E, D, 2, F]; got wi.shape={params['wi'].shape}; without a gate there is one "
            "projection, and nothing to split"
        )
    split = {}
    for name, array in params.items():
        if name not in _PAIRS:
            split[name] = array
            continue
        halves, axis = _PAIRS[name]
        for i, half in enumerate(halves):
            split[half] = jax.lax.index_in_dim(array, i, axis, keepdims=False)
    return split


def merge_wi(params: Params) -> dict[str, jax.Array]:
    """The inverse of `split_wi`, for import: stacks `wi_0` and `wi_1` once, not at each step.

    Raises:
      ValueError: one of the two is missing, their shapes differ, or there is a `wi` too.
      TypeError: one of them is no array.
    """
    _require("merge_wi", params, ("wi_0", "wi_1"), "pass both projections")
    return whole_params("merge_wi", params)


def whole_params(
    function: str, params: Params, names: Collection[str] = tuple(_PAIRS)
) -> dict[str, jax.Array]:
    """The tree with each pair of halves of a parameter of `names` together; errors name `function`.

    GEMMs read both halves as one array. A pass that casts them, from `param_dtype` to another `dtype`, reads the halves
    and writes that array: nothing more is moved. Else this is a copy.
    """
    _check_mapping(function, params)
    whole = {k: v for k, v in params.items() if k not in _WHOLE}
    for name, (pair, axis) in _PAIRS.items():
        if name in names and any(half in params for half in pair):
            _require(function, params, pair, "pass both halves or none")
            _check_apart(function, params, name, pair)
            whole[name] = _stack(function, params, pair, axis)
    return whole


def _check_apart(function: str, params: Params, name: str, pair: Sequence[str]) -> None:
    if name in params:
        raise ValueError(
            f"{function}: params must have {name} or its halves; got also {', '.join(pair)}; remove one of them"
        )


def _stack(function: str, params: Params, names: Sequence[str], axis: int) -> jax.Array:
    halves: dict[str, Any] = {name: params[name] for name in names}
    check_arrays(function, FLOATS, **halves)
    shapes = [params[name].shape for name in names]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{function}: {names[0]} and {names[1]} must have the same shape; got {shapes[0]}, {shapes[1]}; "
            "pass the gate and up projections of one block"
        )
    return jnp.stack([params[name] for name in names], axis=axis)


def _require(function: str, params: Params, names: Collection[str], remedy: str) -> None:
    missing = [name for name in names if name not in params]
    if missing:
        raise ValueError(
            f"{function}: params must have {', '.join(names)}; got {', '.join(sorted(params))}, "
            f"missing {', '.join(missing)}; {remedy}"
        )


def check_params(
    function: str, params: Params, model_dim: int, config: MoEConfig, num_experts: int
) -> None:
    """Raises an error that names `function` unless names, dtypes and shapes are those of the tree.

    Args:
      num_experts: experts in the arrays: `config.num_experts`, or those of one shard inside a `shard_map`.
    """
    check_names(function, params, config)
    for name, w in params.items():
        if isinstance(w, Adapted):
            raise TypeError(
                f"{function}: {name} must be an array; got an Adapted; merge_lora makes one of it and its adapter"
            )
    check_shapes(function, params, model_dim, config, num_experts)


def check_part(
    function: str,
    params: Params,
    names: Collection[str],
    model_dim: int,
    config: MoEConfig,
    num_experts: int,
) -> dict[str, jax.Array]:
    """The parameters of `names` alone, whole, after the errors of `check_params` about them; biases may be absent."""
    params = whole_params(function, params, names)
    weights = tuple(name for name in names if name not in BIASES)
    _require(function, params, weights, "use init_params")
    part = {name: params[name] for name in names if name in params}
    _check_biases(function, part, config.use_bias and len(weights) < len(names))
    check_weights(function, WEIGHTS, **part)
    check_shapes(function, part, model_dim, config, num_experts)
    return part


def gate_part(
    function: str, params: Params, model_dim: int, config: MoEConfig, *, needed: bool
) -> dict[str, jax.Array]:
    """The parameters of the router, after the errors of `check_params` about them; {} where it is outside."""
    _check_mapping(function, params)
    _check_gate(function, params, config, needed)
    part = {name: params[name] for name in GATE + GATE_BIAS if name in params}
    check_weights(function, WEIGHTS, **part)
    check_shapes(function, part, model_dim, config, config.num_experts)
    return part


def check_shapes(
    function: str, params: Params, model_dim: int, config: MoEConfig, num_experts: int
) -> None:
    """Raises an error that names `function` unless the shapes are those of the tree."""
    shapes = _shapes(model_dim, config, num_experts)
    for name, array in params.items():
        if array.shape != shapes[name]:
            layout = ", ".join(_layout(name, config)).upper()
            raise ValueError(
                f"{function}: {name} must be [{layout}] = {shapes[name]}, with D from x, E, F, S and L from the "
                f"config; got {name}.shape={array.shape}, num_experts={config.num_experts}, "
                f"num_null_experts={config.num_null_experts}, "
                f"expert_dim={config.expert_dim}, shared_expert_dim={config.shared_expert_dim}, "
                f"latent_dim={config.latent_dim}; "
                "change the config or the array"
            )


def check_names(
    function: str, params: Params, config: MoEConfig, *, needs_gate: bool = True
) -> None:
    """Raises an error that names `function` unless there are the parameters of the tree, each an array of floats.

    Args:
      needs_gate: whether the tree must have the router's; it may have them.
    """
    _check_mapping(function, params)
    optional = BIASES + GATE + GATE_BIAS
    weights = tuple(name for name in _whole_names(config) if name not in optional)
    _require(function, params, weights, "use init_params")
    _check_gate(function, params, config, needs_gate)
    known = GATE + weights + BIASES + GATE_BIAS
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ValueError(
            f"{function}: params must have the names {', '.join(known)}; got also "
            f"{', '.join(unknown)}; remove them, set config.shared_expert_dim and shared_expert_gate for those of "
            "shared experts"
        )
    _check_biases(function, params, config.use_bias)
    check_weights(function, WEIGHTS, **params)


def _check_mapping(function: str, params: object) -> None:
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{function}: params must be a mapping of names to arrays; got {type(params).__name__}; use init_params"
        )


def _check_gate(function: str, params: Params, config: MoEConfig, needed: bool) -> None:
    if needed or "gate_bias" in params:
        _require(function, params, GATE, "use init_params, or pass `logits` of a router outside")
    if config.use_gate_bias and "gate_kernel" in params:
        _require(function, params, GATE_BIAS, "pass it, or leave use_gate_bias out")


def _check_biases(function: str, params: Params, wanted: bool) -> None:
    if wanted or any(name in params for name in BIASES):
        remedy = "pass all biases or none, and where there are none use_bias=False"
        _require(function, params, BIASES, remedy)

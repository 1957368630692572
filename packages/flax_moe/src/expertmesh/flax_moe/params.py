"""The parameter tree of a MoE block: shapes, initial values, layout, and conversion from split projections.

    gate_kernel [D, E]          wi [E, D, 2, F] (0 gate, 1 up)      wo [E, F, D]
    optional, both or none:     wi_bias [E, 2, F]                   wo_bias [E, D]

The gate and up projections sit beside each other in `wi`, so that F can be split without parting a pair.

Dimension key: D model width, E experts, F expert width.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from expertmesh.core.mesh import MeshResource, current_resource
from expertmesh.flax_moe.config import MoEConfig

__all__ = [
    "LogicalAxes",
    "Params",
    "check_params",
    "init_params",
    "initializers",
    "merge_wi",
    "param_names",
    "param_shapes",
    "param_specs",
    "split_wi",
]

Params = Mapping[str, jax.Array]

_KERNELS = ("gate_kernel", "wi", "wo")
_BIASES = ("wi_bias", "wo_bias")
_LAYOUT = {
    "gate_kernel": "[D, E]",
    "wi": "[E, D, 2, F]",
    "wo": "[E, F, D]",
    "wi_bias": "[E, 2, F]",
    "wo_bias": "[E, D]",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogicalAxes:
    """Names of the parameters' dimensions, to be mapped to mesh axes by a framework's logical axis rules.

    Attributes:
      embed: D of `wi` and `wo`.
      expert: E of everything but the gate.
      mlp: F.

    The gate has no names: every device routes its own tokens and needs all of it.
    """

    embed: str | None = "embed"
    expert: str | None = "exp"
    mlp: str | None = "mlp"

    def of(self, name: str) -> tuple[str | None, ...]:
        """One name (or None) per dimension of the parameter `name`."""
        return _dims(name, embed=self.embed, expert=self.expert, mlp=self.mlp)


def _dims(name: str, *, embed: Any, expert: Any, mlp: Any) -> tuple:
    """What stands for each dimension of a parameter."""
    return {
        "gate_kernel": (None, None),
        "wi": (expert, embed, None, mlp),
        "wo": (expert, mlp, embed),
        "wi_bias": (expert, None, mlp),
        "wo_bias": (expert, None),
    }[name]


def param_names(config: MoEConfig) -> tuple[str, ...]:
    """The names of the tree, in its order."""
    return _KERNELS + _BIASES * config.use_bias


def param_shapes(model_dim: int, config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter, in the order of the tree."""
    D, E, F = model_dim, config.num_experts, config.expert_dim
    shapes = _shapes(D, E, F) | {"gate_kernel": (D, E)}
    return {name: shapes[name] for name in param_names(config)}


def _shapes(D, E, F):
    """With E experts held; the gate's E is always that of the config."""
    return {"wi": (E, D, 2, F), "wo": (E, F, D), "wi_bias": (E, 2, F), "wo_bias": (E, D)}


def initializers() -> dict[str, Callable]:
    """`init(key, shape, dtype)` of each parameter: variance 1 / fan-in of one expert; zeros for biases.

    The fan-in of `gate_kernel` and `wi` is D, that of `wo` is F: the expert dimension is a batch dimension.
    """

    def scaling(in_axis, out_axis, batch_axis=()):
        return jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "normal", in_axis=in_axis, out_axis=out_axis, batch_axis=batch_axis
        )

    return {
        "gate_kernel": scaling(0, 1),
        "wi": scaling(1, (2, 3), (0,)),
        "wo": scaling(1, 2, (0,)),
        "wi_bias": jax.nn.initializers.zeros,
        "wo_bias": jax.nn.initializers.zeros,
    }


def init_params(key: jax.Array, model_dim: int, config: MoEConfig) -> dict[str, jax.Array]:
    """Parameters drawn from `key`, in `config.param_dtype`; see `initializers`.

    Args:
      key: a JAX PRNG key.
      model_dim: D.
      config: see MoEConfig.
    """
    shapes, init = param_shapes(model_dim, config), initializers()
    keys = jax.random.split(key, len(shapes))
    return {
        name: init[name](k, shape, config.param_dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def param_specs(
    config: MoEConfig, resource: MeshResource | None = None
) -> dict[str, PartitionSpec]:
    """Where each parameter lives at rest: experts over ep, D over fsdp, F over tp; the gate is replicated.

    Args:
      config: its `ep_axis`, if given, goes before the resource's.
      resource: names the mesh axes; None: the resource in context, and if there is none only `ep_axis` is used.

    Returns:
      A PartitionSpec with one entry per dimension, for each parameter.

    Each contraction of an expert is over a dimension that fsdp does not split at the time of use: the weight is
    gathered over fsdp and its gradient scattered back. tp splits `wi` by columns and `wo` by rows.
    """
    resource = resource or current_resource() or MeshResource()
    expert = config.ep_axis or resource.entry("experts")
    fsdp, tp = resource.entry("fsdp"), resource.entry("tp")
    return {
        name: PartitionSpec(*_dims(name, embed=fsdp, expert=expert, mlp=tp))
        for name in param_names(config)
    }


def split_wi(params: Params) -> dict[str, jax.Array]:
    """The tree with `wi` [E, D, 2, F] as `wi_0` and `wi_1` [E, D, F] (gate, up); `wi_bias` likewise.

    Raises:
      ValueError: there is no `wi`.
    """
    _require("split_wi", params, ("wi",), "pass a tree of init_params")
    split = {k: v for k, v in params.items() if k not in ("wi", "wi_bias")}
    split |= {"wi_0": params["wi"][:, :, 0], "wi_1": params["wi"][:, :, 1]}
    if "wi_bias" in params:
        split |= {"wi_0_bias": params["wi_bias"][:, 0], "wi_1_bias": params["wi_bias"][:, 1]}
    return split


def merge_wi(params: Params) -> dict[str, jax.Array]:
    """The inverse of `split_wi`, for import: stacks `wi_0` and `wi_1` once, not at each step.

    Raises:
      ValueError: one of the two is missing, or their shapes differ.
    """
    _require("merge_wi", params, ("wi_0", "wi_1"), "pass both projections")
    biases = ("wi_0_bias", "wi_1_bias")
    merged = {k: v for k, v in params.items() if k not in ("wi_0", "wi_1", *biases)}
    merged["wi"] = _stack(params, ("wi_0", "wi_1"), axis=2)
    if any(name in params for name in biases):
        _require("merge_wi", params, biases, "pass both biases or none")
        merged["wi_bias"] = _stack(params, biases, axis=1)
    return merged


def _stack(params, names, axis):
    shapes = [params[name].shape for name in names]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"merge_wi: {names[0]} and {names[1]} must have the same shape; got {shapes[0]}, {shapes[1]}; "
            "pass the gate and up projections of one block"
        )
    return jnp.stack([params[name] for name in names], axis=axis)


def _require(function, params, names, remedy):
    missing = [name for name in names if name not in params]
    if missing:
        raise ValueError(
            f"{function}: params must have {', '.join(names)}; got {', '.join(sorted(params))}, "
            f"missing {', '.join(missing)}; {remedy}"
        )


def check_params(
    function: str, params: Params, model_dim: int, config: MoEConfig, num_experts: int
) -> None:
    """Raises a ValueError in the name of `function` unless names and shapes are those of the tree.

    Args:
      num_experts: experts in the arrays: `config.num_experts`, or those of one shard inside a `shard_map`.
    """
    _require(function, params, _KERNELS, "use init_params, or merge_wi for split projections")
    unknown = [name for name in params if name not in _KERNELS + _BIASES]
    if unknown:
        raise ValueError(
            f"{function}: params must have the names {', '.join(_KERNELS + _BIASES)}; got also "
            f"{', '.join(unknown)}; remove them, or use merge_wi for split projections"
        )
    if any(name in params for name in _BIASES):
        _require(function, params, _BIASES, "pass all biases or none")
    shapes = _shapes(model_dim, num_experts, config.expert_dim)
    shapes["gate_kernel"] = (model_dim, config.num_experts)
    for name, array in params.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"{function}: {name} must be {_LAYOUT[name]} = {shapes[name]}, with D from x, E and F from the "
                f"config; got {name}.shape={array.shape}, num_experts={config.num_experts}, "
                f"expert_dim={config.expert_dim}; change the config or the array"
            )

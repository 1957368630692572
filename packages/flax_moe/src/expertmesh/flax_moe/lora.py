"""LoRA (arXiv:2106.09685) for a block: its weights are frozen, and each of its GEMMs gets two thin ones beside it.

    h = x W + (alpha / rank) (x A) B        A [in, rank], B [rank, out], of each expert and each projection by itself

    wi [E, D, 2, F]          a [E, D, 2, r]      b [E, 2, r, F]
    wo [E, F, D]             a [E, F, r]         b [E, r, D]
    shared_wi [D, 2, S]      a [D, 2, r]         b [2, r, S]
    shared_wo [S, D]         a [S, r]            b [r, D]            latent_down, latent_up likewise

Adapters are a tree of their own, {name: {"a": A, "b": B}}: what you differentiate, optimize and store. `with_lora`
makes parameters of both trees whose weights are `expertmesh.core.Adapted`, and `moe` and its stages take them as they
take arrays. So the law y = x W + (x A) B is stated once, where GEMMs are, and no stage, mesh mode or option has an
argument or a path for it. The gate and up projections are one GEMM, and so are their adapters: A of 2 r columns, B with
zeros off the diagonal, which is 2 r F more multiplications for each row.

Dimension key: D model width, E experts, F expert width, S width of the shared experts, r rank.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from expertmesh.core.config import Config
from expertmesh.core.linear.adapted import Adapted
from expertmesh.core.mesh import MeshResource
from expertmesh.core.operands import FLOATS, as_dtype, check_arrays, check_counts, check_numbers
from expertmesh.core.quantization.quantize import plain
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import (
    EXPERTS,
    LAYERS,
    LogicalAxes,
    Params,
    keys_of,
    param_shapes,
    param_specs,
    split_wi,
    whole_params,
)
from expertmesh.flax_moe.quantization import layers_of

__all__ = [
    "Adapters",
    "LoRA",
    "init_lora",
    "lora_axes",
    "lora_initializers",
    "lora_shapes",
    "lora_specs",
    "low_rank",
    "merge_lora",
    "with_lora",
]

Adapters = Mapping[str, Mapping[str, jax.Array]]

_INITS = ("uniform", "normal")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(Config):
    """Adapters of low rank. A hashable value and a pytree without leaves, as a MoEConfig.

    Attributes:
      rank: r. Use a multiple of 8 on GPUs: other ranks have no kernel.
      alpha: the adapter adds alpha / rank A B.
      targets: the weights that get adapters, some of `wi`, `wo`, `shared_wi`, `shared_wo`, `latent_down`, `latent_up`;
        None: all of these that the block has.
      init: how A is drawn: "uniform" in +-1 / sqrt(in), PEFT's default (Kaiming's with a slope of sqrt(5)), or "normal"
        with deviation 1 / rank, PEFT's "gaussian". B starts as zeros.
      dtype: of A and B at rest: bfloat16, float16 or float32. The GEMMs are in `MoEConfig.dtype`.

    Raises:
      ValueError: a value outside its range.
      TypeError: a value of the wrong type.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    init: str = "uniform"
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self._normalize()
        check_counts("LoRA", rank=self.rank)
        check_numbers("LoRA", "take the rank for a factor of 1", alpha=self.alpha)
        if self.init not in _INITS:
            raise ValueError(
                f"LoRA: init must be one of {', '.join(_INITS)}; got init={self.init!r}; use 'uniform' as PEFT does"
            )
        if isinstance(self.targets, str):
            raise TypeError(
                f"LoRA: targets must be a tuple of names; got {self.targets!r}; pass ({self.targets!r},)"
            )
        for name in self.targets or ():
            if name not in LAYERS:
                raise ValueError(
                    f"LoRA: targets must be of {', '.join(LAYERS)}; got {name!r}; leave it out, or None for all"
                )
        object.__setattr__(self, "dtype", as_dtype("LoRA", "dtype", self.dtype))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def of(self, config: MoEConfig) -> tuple[str, ...]:
        """The targets in a block, in the order of its tree.

        Raises:
          ValueError: one that the block does not have.
        """
        names = layers_of(config)
        if missing := [name for name in self.targets or () if name not in names]:
            raise ValueError(
                f"LoRA: targets must be weights of the block, {', '.join(names)}; got {', '.join(missing)}; "
                "leave them out, or None for all"
            )
        return tuple(name for name in names if self.targets is None or name in self.targets)


def low_rank(name: str, dims: tuple[Any, ...], rank: Any) -> dict[str, tuple[Any, ...]]:
    """What holds for each dimension of A and B, from what holds for those of the weight `name` and for the rank."""
    k = int(name in EXPERTS)
    return {"a": (*dims[:-1], rank), "b": (*dims[:k], *dims[k + 1 : -1], rank, dims[-1])}


def lora_shapes(
    model_dim: int, config: MoEConfig, lora: LoRA
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shape of each A and B."""
    LoRA.check("lora_shapes", lora=lora)
    MoEConfig.check("lora_shapes", config=config)
    shapes = param_shapes(model_dim, _whole(config))
    return {name: low_rank(name, shapes[name], lora.rank) for name in lora.of(config)}


def lora_specs(
    config: MoEConfig, lora: LoRA, resource: MeshResource | None = None
) -> dict[str, dict[str, PartitionSpec]]:
    """Where each A and B lives at rest: A like the input side of its weight, B like the output side; r is never
    split.
    """
    LoRA.check("lora_specs", lora=lora)
    MoEConfig.check("lora_specs", config=config)
    specs = param_specs(_whole(config), resource)
    return {
        name: {
            part: PartitionSpec(*spec)
            for part, spec in low_rank(name, tuple(specs[name]), None).items()
        }
        for name in lora.of(config)
    }


def lora_axes(name: str, axes: LogicalAxes, *, gated: bool) -> dict[str, tuple[str | None, ...]]:
    """Names of the dimensions of A and B of a weight, as `LogicalAxes.of` gives the weight's."""
    return low_rank(name, axes.of(name, gated=gated), None)


def lora_initializers(name: str, lora: LoRA) -> dict[str, Any]:
    """`init(key, shape, dtype)` of A and of B of a weight."""

    def of_a(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if lora.init == "normal":
            drawn: jax.Array = jax.random.normal(key, shape, dtype) / lora.rank
            return drawn
        fan_in = shape[int(name in EXPERTS)]
        drawn = jax.random.uniform(key, shape, dtype, -1, 1) * fan_in**-0.5
        return drawn

    return {"a": of_a, "b": jax.nn.initializers.zeros}


def init_lora(
    key: jax.Array, model_dim: int, config: MoEConfig, lora: LoRA
) -> dict[str, dict[str, jax.Array]]:
    """Adapters {name: {"a", "b"}} of `lora_shapes` in `lora.dtype`: A drawn from `key`, B zeros.

    At first the block computes the same as without them.

    Args:
      key: a JAX PRNG key.
      model_dim: D.
      config: see MoEConfig.
      lora: see LoRA.

    Raises:
      ValueError: a target that the block does not have.
    """
    LoRA.check("init_lora", lora=lora)
    MoEConfig.check("init_lora", config=config)
    shapes = lora_shapes(model_dim, config, lora)
    return {
        name: {
            part: init(own_key, shapes[name][part], lora.dtype)
            for part, init in lora_initializers(name, lora).items()
        }
        for name, own_key in keys_of(key, shapes).items()
    }


def with_lora(params: Params, adapters: Adapters, lora: LoRA) -> dict[str, Any]:
    """Parameters for `moe` whose weights are frozen, with adapters beside them: W + alpha / rank A B.

    Args:
      params: of the block, in any floating dtype; each of the weights of GEMMs may be a QuantizedArray, as
        `checkpoint.load_sharded(keep_fp8=True)` gives it.
      adapters: of `init_lora`, or of `peft.load_adapters`; {} freezes the weights alone.
      lora: see LoRA.

    Returns:
      The tree with an `expertmesh.core.Adapted` for each weight of a GEMM, with or without an adapter. Router and
      biases are unchanged: they get a gradient if you ask for one.

    Raises:
      ValueError: an adapter of a weight that is not there, or of other shapes than `lora_shapes`.
      TypeError: params or an adapter that is no array.

    Differentiable in the adapters, through `moe`, and in the parameters that are not frozen. The gradient of a frozen
    weight is zeros, and nothing is computed for it. Costs reads and writes of A and B; nothing crosses devices.
    """
    LoRA.check("with_lora", lora=lora)
    whole = whole_params("with_lora", params)
    _check_adapters(whole, adapters, lora)
    out: dict[str, Any] = dict(whole)
    for name in LAYERS:
        if name in whole:
            out[name] = Adapted(whole[name], *_joined(name, adapters.get(name), lora))
    return out


def merge_lora(params: Params, adapters: Adapters, lora: LoRA) -> dict[str, jax.Array]:
    """W + alpha / rank A B, added in float32 and rounded once to the dtype of W.

    Args:
      params, adapters, lora: see `with_lora`.

    Returns:
      The tree of `params`. A weight that was quantized comes back in `QuantizedArray.dtype`.

    Raises:
      As `with_lora`.

    Sharded as the weights: each device gathers the side of A or B that its shard lacks.
    """
    LoRA.check("merge_lora", lora=lora)
    whole = whole_params("merge_lora", params)
    _check_adapters(whole, adapters, lora)
    merged = {name: plain(w) for name, w in whole.items()}
    for name, adapter in adapters.items():
        w, a, b = (x.astype(jnp.float32) for x in (merged[name], adapter["a"], adapter["b"]))
        experts, pair = "e" * (name in EXPERTS), "p" * _is_pair(name, w)
        law = f"{experts}k{pair}r,{experts}{pair}rn->{experts}k{pair}n"
        delta = jnp.einsum(law, a, b, precision=jax.lax.Precision.HIGHEST)
        merged[name] = (w + lora.scale * delta).astype(merged[name].dtype)
    return split_wi(merged) if "wi_0" in params else merged


def _whole(config: MoEConfig) -> MoEConfig:
    return dataclasses.replace(config, separate_wi=False)


def _is_pair(name: str, w: Any) -> bool:
    """Whether a weight is a gate and an up projection."""
    return bool(w.ndim - (name in EXPERTS) == 3)


def _joined(
    name: str, adapter: Mapping[str, jax.Array] | None, lora: LoRA
) -> tuple[jax.Array, jax.Array] | tuple[()]:
    """A and B of one GEMM, the factor in B."""
    if adapter is None:
        return ()
    a, b = adapter["a"], lora.scale * adapter["b"]
    if not _is_pair(name, b):
        return a, b
    *_, two, rank, width = b.shape
    diagonal = np.eye(two, dtype=bool)[:, None, :, None]
    b = jnp.where(diagonal, b[..., None, :], 0)
    return a.reshape(*a.shape[:-2], two * rank), b.reshape(*b.shape[:-4], two * rank, two, width)


def _check_adapters(params: Params, adapters: Adapters, lora: LoRA) -> None:
    for name, adapter in adapters.items():
        if name not in params or name not in LAYERS:
            raise ValueError(
                f"lora: adapters must be of weights of the block, {_named(params)}; got {name}; make them with "
                "init_lora for this config"
            )
        for part, shape in low_rank(name, tuple(params[name].shape), lora.rank).items():
            given: dict[str, Any] = {f"{name}.{part}": adapter.get(part)}
            check_arrays("lora", FLOATS, **given)
            if adapter[part].shape != shape:
                raise ValueError(
                    f"lora: {part} of {name} must be {shape}, by the weight and rank={lora.rank}; "
                    f"got {adapter[part].shape}; pass the LoRA that it was made with"
                )


def _named(names: Collection[str]) -> str:
    return ", ".join(name for name in LAYERS if name in names)

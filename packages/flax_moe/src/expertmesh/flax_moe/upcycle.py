"""A dense feed-forward as a block that computes the same: sparse upcycling (arXiv:2212.05055), with narrower experts
virtual groups (arXiv:2410.07524).

    Fd = S + G F         the dense width: S columns to the shared experts, if there are any, and G parts of F
    E  = C G             C copies of each part; expert c G + g is part g of copy c
    gate[:, c G + g] = u_c                                    the parts of a copy have one column
    wo_e = (G / f) part_g                                     f: `scaling_factor`

A token's scores are equal within a copy. Of equal scores the lower index comes first, so that the K choices are K / G
whole copies, also where copies tie. Each part of a chosen copy has the same weight, and all K weights add up to f, so
those of one part, over the chosen copies, to f / G: the parts add up to the dense layer, times 1.

It holds where the weights of the chosen add up to a constant: a softmax over the chosen, or scores that are divided by
their sum. It does not for a softmax over all experts, whose chosen part depends on the token, nor where a choice may be
dropped or be of a null expert.

Dimension key: D model width, E experts, F expert width, S width of the shared experts, Fd dense width, G parts, C
copies.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.operands import FLOATS, check_arrays
from expertmesh.flax_moe.config import MoEConfig
from expertmesh.flax_moe.params import EXPERTS, initializers, param_names, split_wi

__all__ = ["upcycle"]

Dense = Mapping[str, jax.Array]


def upcycle(
    key: jax.Array, dense: Dense, config: MoEConfig, *, noise: float = 0.0
) -> dict[str, jax.Array]:
    """Makes parameters of a block that at first computes `act(x wi + wi_bias) wo + wo_bias`, with its own activation.

    Args:
      key: a JAX PRNG key, for the router's columns u_c and for the noise.
      dense: `wi` [D, 2, Fd] (0 gate, 1 up; [D, Fd] without a gate) and `wo` [Fd, D], and if there are biases `wi_bias`
        [2, Fd] and `wo_bias` [D].
      config: that of the block. F = Fd gives copies of the whole layer, F = Fd / G gives copies of G parts of it. With
        `scaling_factor` G the parts are unchanged; otherwise `wo` and its bias are times G / scaling_factor.
      noise: standard deviation of normal noise that is added to each expert's weights, relative to the root mean square
        of the dense weight. Copies then differ before they are trained, and y is the dense layer's plus noise.

    Returns:
      The tree of `init_params(key, D, config)` in `config.param_dtype`. Without noise y is the dense layer's but for
      rounding: of the router's weights to float32, and of the parts' sums in another order. That asks equal columns of
      `x @ gate_kernel` for equal logits, which a GEMM gives that adds each column in the same order. With shared
      experts their `shared_gate` is zeros, which is sigmoid 1/2, and `shared_wo` times 2.

    Raises:
      ValueError: F (and S) that do not add up to Fd; G that does not divide E, top_k or a router group; a config whose
        weights of the chosen do not add up to a constant, that may drop tokens, or without a router; null experts, a
        latent width, biases beside shared experts.
      TypeError: a dense weight that is no array.

    Run it under `jit` with `out_shardings` of `param_specs` for parameters that no device holds as a whole.
    """
    MoEConfig.check("upcycle", config=config)
    parts = _parts(dense, config)
    _check(config, parts, dense)
    key, of_router = jax.random.split(key)
    whole = dataclasses.replace(config, separate_wi=False)
    made = _router(of_router, dense, whole, parts)
    made |= _experts(dense, config, parts) | _shared(dense, config)
    out = {}
    for i, name in enumerate(param_names(whole)):
        w = made[name]
        if noise and name in EXPERTS:
            w = _noisy(jax.random.fold_in(key, i), w, noise)
        out[name] = w.astype(config.param_dtype)
    return split_wi(out) if config.separate_wi else out


def _router(key: jax.Array, dense: Dense, config: MoEConfig, parts: int) -> dict[str, jax.Array]:
    """The router's columns, one of all parts of a copy, and its bias, zeros."""
    shape = dense["wi"].shape[0], config.num_experts // parts
    columns = initializers(config)["gate_kernel"](key, shape, config.param_dtype)
    bias = jnp.zeros(config.num_experts, config.param_dtype)
    return {"gate_kernel": jnp.repeat(columns, parts, axis=1), "gate_bias": bias}


def _experts(dense: Dense, config: MoEConfig, parts: int) -> dict[str, jax.Array]:
    """The routed experts' weights and biases."""
    first, copies = config.shared_expert_dim or 0, config.num_experts // parts
    factor = 1 / config.scaling_factor

    def cut(w: jax.Array, axis: int) -> jax.Array:
        """C copies of G parts of F along a dimension of Fd."""
        w = jax.lax.slice_in_dim(w, first, w.shape[axis], axis=axis)
        w = w.reshape(*w.shape[:axis], parts, -1, *w.shape[axis + 1 :])
        w = jnp.moveaxis(w, axis, 0)
        return jnp.tile(w, (copies, *[1] * (w.ndim - 1)))

    wi, wo = dense["wi"], dense["wo"]
    out = {"wi": cut(wi, wi.ndim - 1), "wo": cut(wo, 0) * (parts * factor)}
    if config.use_bias:
        wi_bias = dense.get("wi_bias", jnp.zeros(wi.shape[1:], wi.dtype))
        wo_bias = dense.get("wo_bias", jnp.zeros(wo.shape[1:], wo.dtype)) * factor
        out["wi_bias"] = cut(wi_bias, wi_bias.ndim - 1)
        # Each of K rows adds it, with weights that add up to the factor.
        out["wo_bias"] = jnp.tile(wo_bias, (config.num_experts, 1))
    return out


def _shared(dense: Dense, config: MoEConfig) -> dict[str, jax.Array]:
    """The shared experts' weights: the first columns of the dense layer."""
    S = config.shared_expert_dim
    if S is None:
        return {}
    wi, wo = dense["wi"][..., :S], dense["wo"][:S]
    gated = config.shared_expert_gate
    out = {"shared_wi": wi, "shared_wo": 2 * wo if gated else wo}
    return out | ({"shared_gate": jnp.zeros(wi.shape[0], wi.dtype)} if gated else {})


def _noisy(key: jax.Array, w: jax.Array, noise: float) -> jax.Array:
    size = jnp.sqrt(jnp.mean(jnp.square(w.astype(jnp.float32))))
    return w + noise * size * jax.random.normal(key, w.shape)


def _parts(dense: Dense, config: MoEConfig) -> int:
    """G, after the errors about the dense layer's shapes."""
    weights: dict[str, Any] = {name: dense.get(name) for name in ("wi", "wo")}
    biases: dict[str, Any] = {name: dense[name] for name in ("wi_bias", "wo_bias") if name in dense}
    check_arrays("upcycle", FLOATS, **weights, **biases)
    wi, wo = dense["wi"].shape, dense["wo"].shape
    pair = (2,) if config.act.gated else ()
    if len(wo) != 2 or wi != (wo[1], *pair, wo[0]):
        raise ValueError(
            f"upcycle: wi must be [D, {'2, ' if pair else ''}Fd] and wo [Fd, D], by the activation "
            f"{config.activation}; got wi {wi}, wo {wo}; transpose them, or stack gate and up projections"
        )
    for name, shape in {"wi_bias": wi[1:], "wo_bias": wo[1:]}.items():
        if name in dense and dense[name].shape != shape:
            raise ValueError(
                f"upcycle: {name} must be {shape}, by the weights; got {dense[name].shape}; reshape it"
            )
    rest = wo[0] - (config.shared_expert_dim or 0)
    if rest <= 0 or rest % config.expert_dim:
        raise ValueError(
            "upcycle: the dense width must be that of the shared experts and a multiple of expert_dim; got "
            f"{wo[0]}, shared_expert_dim={config.shared_expert_dim}, expert_dim={config.expert_dim}; "
            "change one of these two"
        )
    return int(rest // config.expert_dim)


def _check(config: MoEConfig, parts: int, dense: Dense) -> None:
    """Raises where y would not be the dense layer's."""
    for rule, got, remedy in _broken(config, parts, dense):
        raise ValueError(f"upcycle: {rule}; got {got}; {remedy}")


def _broken(config: MoEConfig, parts: int, dense: Dense) -> Iterator[tuple[str, str, str]]:
    sizes = {"num_experts": config.num_experts, "top_k": config.top_k}
    if config.num_groups is not None:
        sizes["experts of a router group"] = config.num_experts // config.num_groups
    for name, size in sizes.items():
        if size % parts:
            rule = f"{name} must be a multiple of the {parts} parts of the dense layer"
            yield rule, f"{size}", "choose whole copies, or another expert_dim"
    softmax = config.score_function == "softmax"
    if config.use_pre_softmax if softmax else not config.router.divides:
        yield (
            "the weights of the chosen experts must add up to a constant",
            f"score_function={config.score_function}, use_pre_softmax={config.use_pre_softmax}, "
            f"normalize={config.normalize}",
            "take a softmax over the chosen, or normalize=True",
        )
    if not config.scaling_factor:
        yield "scaling_factor must not be 0", "0", f"take {parts}, the number of parts"
    if config.capacity_factor is not None:
        rule, got = "no token may be dropped", f"capacity_factor={config.capacity_factor}"
        yield rule, got, "upcycle without, and set it for training: the tree is the same"
    biased = "wi_bias" in dense or "wo_bias" in dense
    for wrong, rule, remedy in (
        (not config.use_gate, "the router must be the block's", "leave use_gate=False out"),
        (config.num_null_experts, "there must be no null experts", "add them afterwards"),
        (config.latent_dim, "experts must work at the model's width", "leave latent_dim out"),
        (biased and not config.use_bias, "biases must go with use_bias", "set use_bias=True"),
        (
            biased and config.shared_expert_dim,
            "shared experts have no biases, as the dense layer has",
            "leave shared_expert_dim out",
        ),
    ):
        if wrong:
            yield rule, f"{config}", remedy

"""Gradient accumulation as a value: parameters whose gradient is a running sum plus their own.

f(accumulate_gradient(w, total)):  value f(w),  gradient in w: total + df/dw

It is for totals that are values: a scan's carry, a donated argument of a step, under `jax.grad`. The trainer of
`expertmesh.train` adds to references of JAX (`jax.new_ref`, the `with_refs` of a `jax.vjp`), which one step makes and
freezes, so that stacked layers have no gradient beside their total.
"""

from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.core.vjp import differentiable

__all__ = ["accumulate_gradient"]


def accumulate_gradient(params: Any, totals: Any) -> Any:
    """Returns `params`, whose gradient then starts from `totals` instead of 0.

    A step passes the sum of gradients from one microbatch to the next:

        def step(totals, batch):
            loss = lambda params: model(accumulate_gradient(params, totals), batch)
            return jax.grad(loss)(params), None

        gradients, _ = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), batches)

    Args:
      params: pytree of float arrays, used only through the result; each leaf's total is added once per call.
      totals: pytree of the same structure, shapes and dtypes: the sum of the gradients so far. Its gradient is zero.

    Returns:
      `params`.

    Raises:
      ValueError: structures or shapes differ.
      TypeError: a leaf is not float32 or float64, or dtypes differ: the sum would be rounded at each step.

    Each gradient is added as soon as it is known, where its parameter is (after the reduce-scatter), in the parameter's
    dtype. A loop's carry or a donated total is updated in place. Every op supports it, under remat too, and under a
    scan over layers if you scan the totals with the parameters. No communication if both have the same layout.
    """
    trees = [jax.tree.structure(tree) for tree in (params, totals)]
    if len(set(trees)) > 1:
        raise ValueError(
            f"accumulate_gradient: totals must have the structure of params; got {trees[1]} for {trees[0]}; "
            "start with jax.tree.map(jnp.zeros_like, params)"
        )
    return jax.tree.map(_accumulated, params, totals)


def _accumulated(w: Any, total: Any) -> jax.Array:
    w, total = jnp.asarray(w), jnp.asarray(total)
    if w.shape != total.shape:
        raise ValueError(
            f"accumulate_gradient: a total must have the shape of its parameter; got {total.shape} for {w.shape}; "
            "start with jnp.zeros_like(w)"
        )
    if w.dtype != total.dtype or w.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            "accumulate_gradient: parameters and totals must be float32 (or both float64), as sums in less lose small "
            f"gradients; got {w.dtype} and {total.dtype}; keep a float32 master, which gemm and grouped_gemm cast"
        )
    return _with_total(w, total)


def _fwd(w: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w, total


def _bwd(total: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent + total, jnp.zeros_like(total)


_with_total = differentiable(_fwd, _bwd)

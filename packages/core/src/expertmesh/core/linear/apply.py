"""One forward and one backward rule for every layer of GEMMs: dense or grouped, in the formats of a recipe or plain.

    y  = x w + bias        x and w in their formats along the contraction, K
    dx = dy w^T            dy and w along N
    dw = x^T dy            x and dy along the tokens
    dbias                  the sum of dy over the tokens, in no format

Without a recipe the format is the identity: each operand is its own copy.

A weight may be an `Adapted`: it is then frozen, so that x is not kept for dw, which is None, and with A and B

    y += u B,  u = x A        v = dy B^T        dx += v A^T        dA = x^T v        dB = u^T dy

the same three GEMMs, twice, A, B, u and v being in no format; x and dy may be in that of the GEMM beside. Of grouped
GEMMs u B and v A^T are part of the sums of y and dx, so that neither is written.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core.features import warn_if_emulated
from expertmesh.core.linear.adapted import (
    Adapted,
    base_of,
    is_low_rank,
    low_rank_spec,
    without_base,
)
from expertmesh.core.linear.layer import (
    DenseState,
    Layer,
    Linear,
    NonDiffOperands,
    Specs,
    barrier,
    check_extra,
    gradient_keys,
    read_residual,
    residuals,
    resolved_specs,
)
from expertmesh.core.linear.pair import both_quantized, multiply
from expertmesh.core.linear.quantize_weight import weight_copies
from expertmesh.core.mesh import cast_sharded
from expertmesh.core.op import Op, check_reduce_dtype
from expertmesh.core.operands import check_out_dtype
from expertmesh.core.ops.row_map import move_rows
from expertmesh.core.quantization.quantize import plain
from expertmesh.core.quantization.quantize_rows import Copies, Moved, Rows, tokens_of
from expertmesh.core.quantization.quantized import is_quantized
from expertmesh.core.quantization.recipe import Recipe
from expertmesh.core.vjp import at_rest, differentiable


class LowRankTerm(NamedTuple):
    """A term of low rank: u B of the forward, v A^T of the input gradient.

    Attributes:
      inner: u or v, [*tokens, R].
      outer: B [*E, R, *N] or A [*E, K, R], as GEMMs read it.
      layer: of u B or of x A, whose GEMM the term is.
    """

    inner: jax.Array
    outer: jax.Array
    layer: Layer


def apply_linear(
    layer: Layer,
    x: Any,
    w: Any,
    group_sizes: jax.Array | None,
    bias: jax.Array | None,
    extra: NonDiffOperands | None = None,
    *,
    flat: bool = False,
) -> Any:
    """The layer's result; with a state (result, state).

    Args:
      x, w: plain, or without a recipe both quantized, which then are constants; w may be an Adapted, and x of groups
        without a recipe `Moved`.
      group_sizes: None unless the layer is grouped.
      flat: of the result, which has one row of tokens or one participant, take this one.
    """
    if layer.recipe is None and is_quantized(x, w):
        both = both_quantized(layer.law.fprop.name, layer.law.name, x, w)
        return forward_gemm(*both, group_sizes, bias, layer)
    out = _linear(x, w, group_sizes, bias, extra or NonDiffOperands(), layer=layer)
    if not flat:
        return out
    return (out[0][0], out[1]) if layer.delayed else out[0]


def layer_of(
    name: str,
    law: Linear,
    x: Any,
    w: Any,
    extra: NonDiffOperands,
    recipe: Recipe | None,
    *,
    out_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike,
    specs: Specs,
    clear_padding: bool = False,
) -> Layer:
    """The static options of a call, after the errors, which name `name`; `specs`: of x, w and the result."""
    check_extra(name, w, extra, recipe)
    if recipe is not None:
        warn_if_emulated(recipe, *jax.tree.leaves((x, w)))
    return Layer(
        law=law,
        recipe=recipe,
        x_dtype=jnp.dtype(x.dtype),
        w_dtype=jnp.dtype(w.dtype),
        out_dtype=check_out_dtype(name, out_dtype or x.dtype),
        reduce_dtype=check_reduce_dtype(name, reduce_dtype),
        caller=specs,
        resolved=specs if recipe is None else resolved_specs(law, x.ndim, w.ndim, specs),
        clear_padding=clear_padding,
    )


def forward_gemm(
    x: Any,
    w: Any,
    group_sizes: jax.Array | None,
    bias: jax.Array | None,
    layer: Layer,
    *,
    low_rank: LowRankTerm | None = None,
) -> jax.Array:
    """The forward's GEMM, and the bias, of operands in the formats along K; `low_rank`: u B, if there is one."""
    law, (x_spec, w_spec, _) = layer.law, layer.resolved
    op, more = _with_term(law.fprop, law.fprop_low_rank, x, low_rank)
    y = multiply(
        op,
        law.fprop.name,
        (x, x.ndim - 1),
        (w, law.batch_dims),
        group_sizes,
        specs=(x_spec, w_spec),
        more=more,
        out_dtype=layer.out_dtype,
        result_specs=(layer.caller[2],),
        **layer.row_options,
    )
    if low_rank is not None and not more:
        u, b, of_b = low_rank
        of_b = dataclasses.replace(of_b, caller=(*of_b.caller[:2], at_rest(y, of_b.caller[2])))
        y += forward_gemm(u, b, group_sizes, None, of_b)
    return add_bias(y, bias, group_sizes, layer)


def _with_term(
    op: Op, op_low_rank: Op | None, rows: Any, low_rank: LowRankTerm | None
) -> tuple[Op, tuple[tuple[jax.Array, PartitionSpec | None], ...]]:
    """The GEMM, and the operands, with their specs, of a term that is part of its sums.

    To rows of 8 bits kernels add terms of 16, so that one of 32 is a GEMM of its own.
    """
    if low_rank is None or op_low_rank is None:
        return op, ()
    if is_quantized(rows) and low_rank.inner.dtype.itemsize > 2:
        return op, ()
    inner, outer, layer = low_rank
    return op_low_rank, ((inner, None), (outer, layer.resolved[1]))


def add_bias(
    y: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array | None,
    layer: Layer,
    weights: jax.Array | None = None,
) -> jax.Array:
    """y + bias, times the weights of rows in groups if given; y without a bias."""
    if bias is None:
        return y
    of_groups = () if group_sizes is None else (group_sizes, weights)
    specs = layer.resolved[2], layer.law.bias_spec(layer.resolved[1]), *(None for _ in of_groups)
    out: jax.Array = layer.law.add_bias(y, bias, *of_groups, operand_specs=specs)
    return out


def bias_gradient(
    dy: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array | None,
    layer: Layer,
    weights: jax.Array | None = None,
) -> jax.Array | None:
    """The cotangent of the bias of `add_bias`; None without a bias."""
    if bias is None:
        return None
    law, (_, w_spec, out_spec) = layer.law, layer.resolved
    spec = law.bias_spec(w_spec)
    grouped = group_sizes is not None
    others, specs = ((group_sizes, weights), (None, None)) if grouped else ((bias,), (spec,))
    out: jax.Array | None = law.bias_grad(
        dy,
        *others,
        out_dtype=bias.dtype,
        operand_specs=(out_spec, *specs),
        result_specs=(at_rest(bias, spec),),
        **law.weight_options(bias),
    )
    return out


def input_gradient(
    dy: Any,
    w: Any,
    group_sizes: jax.Array | None,
    layer: Layer,
    *,
    result_spec: PartitionSpec | None,
    low_rank: LowRankTerm | None = None,
) -> jax.Array:
    """The cotangent of x at `result_spec`; dy and w in their formats along N; `low_rank`: v A^T, if there is one."""
    law, (_, w_spec, out_spec) = layer.law, layer.resolved
    op, more = _with_term(law.dgrad, law.dgrad_low_rank, dy, low_rank)
    if is_quantized(w):
        w, dy = barrier(w, dy)
        w = w if is_quantized(tokens_of(dy)) else _widened(w, layer)
    dx = multiply(
        op,
        f"{law.fprop.name}'s input gradient",
        (dy, dy.ndim - 1),
        (w, w.ndim - 1),
        group_sizes,
        specs=(out_spec, w_spec),
        more=more,
        out_dtype=layer.x_dtype,
        result_specs=(result_spec,),
        **layer.row_options,
    )
    if low_rank is not None and not more:
        v, a, of_a = low_rank
        dx += input_gradient(v, a, group_sizes, of_a, result_spec=at_rest(dx, layer.caller[0]))
    return dx


def weight_gradient(
    x: Any, dy: Any, w: Any, group_sizes: jax.Array | None, layer: Layer
) -> jax.Array:
    """The cotangent of w, in any format; x and dy in their formats along the tokens."""
    law, (x_spec, _, out_spec) = layer.law, layer.resolved
    return multiply(
        law.wgrad,
        f"{law.fprop.name}'s weight gradient",
        (x, x.ndim - 2),
        (dy, x.ndim - 2),
        group_sizes,
        multiple=False,
        specs=(x_spec, out_spec),
        out_dtype=layer.w_dtype,
        result_specs=(where_at_rest(w, layer.caller[1]),),
        reduce_dtype=layer.reduce_dtype,
        **law.weight_options(w),
    )


def where_at_rest(x: Any, spec: PartitionSpec | None) -> PartitionSpec | None:
    """`at_rest` of an operand in any format."""
    return at_rest(jax.tree.leaves(x)[0], spec)


def w_copies(
    w: Any, extra: NonDiffOperands, layer: Layer, *, for_dgrad: bool
) -> tuple[Any, Any, Any]:
    """(w as the forward reads it, what the backward reads or makes it of, its state after that or None).

    Of an Adapted its weight; the second is None unless `for_dgrad`.
    """
    w = base_of(w)
    if layer.recipe is None:
        read = _widened(w, layer)
        kept = w if is_quantized(w) else read  # Kept in 8 bits, not in 16.
        return read, kept if for_dgrad else None, None
    state = extra.state.weight if extra.state is not None else None
    made = extra.weight_quantized
    if made is not None:
        return made.for_forward(), made.for_dgrad() if for_dgrad else None, state
    where = layer.law.batch_dims, state, layer.resolved[1]
    return weight_copies(w, layer.recipe, *where, for_dgrad=for_dgrad)


def _widened(w: Any, layer: Layer) -> jax.Array:
    """A weight in the dtype of x, where it is at rest."""
    law, spec = layer.law, layer.resolved[1]
    return cast_sharded(plain(w, spec=spec), layer.x_dtype, spec, law.weight_roles)


def x_copies(
    x: Any, group_sizes: Any, extra: NonDiffOperands, layer: Layer, *, for_wgrad: bool
) -> tuple[Any, Any, Any]:
    """(x along K, x along the tokens if `for_wgrad`, the state of x after it or None); x: or `Rows` in groups."""
    if layer.recipe is None:
        x = _as_read(x, group_sizes, layer.resolved[0])
        return x, x, None
    state = extra.state.x if extra.state is not None else None
    out: tuple[Any, Any, Any] = layer.law.quantize_x(
        x, group_sizes, state, layer, for_wgrad=for_wgrad
    )
    return out


def dy_copies(
    dy: Any,
    group_sizes: Any,
    key: jax.Array | None,
    layer: Layer,
    *,
    tokens: int = 1,
    for_wgrad: bool = True,
) -> Copies:
    """dy along the last of N and, if `for_wgrad`, along the last dimension of tokens, `tokens`.

    dy may be `Rows` in groups.
    """
    if layer.recipe is None:
        dy = _as_read(dy, group_sizes, layer.resolved[2])
        return Copies(dy, dy, None)
    keys = gradient_keys(layer, key)
    along_tokens = tokens if for_wgrad else None
    out: Copies = layer.law.quantize_dy(dy, group_sizes, keys, layer, tokens=along_tokens)
    return out


def _as_read(x: Any, group_sizes: Any, spec: PartitionSpec | None) -> Any:
    """What the GEMMs read of an operand, or of `Rows`, without a recipe: of tokens they read the rows themselves."""
    if not isinstance(x, Rows) or isinstance(x, Moved):
        return x
    rows, _ = x.apart(group_sizes, spec)
    return rows


def low_rank_layers(w: Adapted, layer: Layer) -> tuple[Layer, Layer]:
    """Those of x A and of u B, of the layer of x W."""
    assert w.a is not None and w.b is not None
    x_spec, w_spec, out_spec = layer.caller
    of_a, of_b = low_rank_spec(w_spec, w.b.ndim, layer.law.batch_dims)

    def thin(part: jax.Array, out_dtype: jnp.dtype, *specs: PartitionSpec | None) -> Layer:
        known: Any = dict(caller=specs, resolved=specs, w_dtype=jnp.dtype(part.dtype))
        return dataclasses.replace(layer, recipe=None, out_dtype=out_dtype, **known)

    inner = thin(w.a, layer.x_dtype, x_spec, of_a, None)
    return inner, thin(w.b, layer.out_dtype, None, of_b, out_spec)


def low_rank_u(x: Any, w: Any, group_sizes: jax.Array | None, layer: Layer) -> jax.Array:
    """u = x A of a weight with A and B, which the backward reads again; x in any format, or `Moved`."""
    of_a, _ = low_rank_layers(w, layer)
    return forward_gemm(x, _widened(w.a, of_a), group_sizes, None, of_a)


def low_rank_term(u: jax.Array, w: Any, layer: Layer) -> LowRankTerm:
    """u B, of the forward."""
    _, of_b = low_rank_layers(w, layer)
    return LowRankTerm(u, _widened(w.b, of_b), of_b)


def low_rank_cotangents(
    dy: Any, u: jax.Array, w: Any, group_sizes: jax.Array | None, layer: Layer
) -> tuple[jax.Array, jax.Array]:
    """v = dy B^T, where u is, and dB = u^T dy; dy in any format."""
    _, of_b = low_rank_layers(w, layer)
    b, spec, law = _widened(w.b, of_b), at_rest(u, None), layer.law
    if law.cotangents is None or not isinstance(dy, jax.Array):
        v = input_gradient(dy, b, group_sizes, of_b, result_spec=spec)
        return v, weight_gradient(u, dy, w.b, group_sizes, of_b)
    _, b_spec, out_spec = of_b.resolved
    results = spec, where_at_rest(w.b, of_b.caller[1])
    operands, specs = (dy, b, group_sizes, u), (out_spec, b_spec, None, None)
    v, d_b = law.cotangents(*operands, operand_specs=specs, result_specs=results)
    return v.astype(u.dtype), d_b.astype(w.b.dtype)


def low_rank_dgrad_term(v: jax.Array, w: Any, layer: Layer) -> LowRankTerm:
    """v A^T, of the input gradient."""
    of_a, _ = low_rank_layers(w, layer)
    return LowRankTerm(v, _widened(w.a, of_a), of_a)


def low_rank_gradient(
    x: Any, v: jax.Array, d_b: jax.Array, w: Any, group_sizes: jax.Array | None, layer: Layer
) -> Adapted:
    """The cotangent of a weight with A and B: dA = x^T v and dB; x in any format."""
    of_a, _ = low_rank_layers(w, layer)
    return Adapted(None, weight_gradient(x, v, w.a, group_sizes, of_a), d_b)


def _forward(
    x: jax.Array,
    copies: tuple[Any, Any, Any],
    w: Any,
    group_sizes: jax.Array | None,
    bias: jax.Array | None,
    extra: NonDiffOperands,
    layer: Layer,
    *,
    for_dgrad: bool,
) -> tuple[Any, Any, jax.Array | None]:
    """(what the layer returns, w for the backward if `for_dgrad`, u of a low rank)."""
    along_k, _, x_state = copies
    read, kept, w_state = w_copies(w, extra, layer, for_dgrad=for_dgrad)
    u = low_rank_u(x, w, group_sizes, layer) if is_low_rank(w) else None
    term = None if u is None else low_rank_term(u, w, layer)
    y = forward_gemm(along_k, read, group_sizes, bias, layer, low_rank=term)
    if x_state is None or w_state is None:
        return y, kept, u
    return (y, DenseState(x_state, w_state)), kept, u


def _value(
    x: Any,
    w: Any,
    group_sizes: jax.Array | None,
    bias: jax.Array | None,
    extra: NonDiffOperands,
    *,
    layer: Layer,
) -> Any:
    copies = x_copies(x, group_sizes, extra, layer, for_wgrad=False)
    return _forward(x, copies, w, group_sizes, bias, extra, layer, for_dgrad=False)[0]


def _fwd(
    x: Any,
    w: Any,
    group_sizes: jax.Array | None,
    bias: jax.Array | None,
    extra: NonDiffOperands,
    *,
    layer: Layer,
) -> tuple[Any, tuple[Any, ...]]:
    adapter = without_base(w)
    copies = x_copies(x, group_sizes, extra, layer, for_wgrad=adapter is None)
    operands = x, copies, w, group_sizes, bias, extra
    out, kept_w, u = _forward(*operands, layer, for_dgrad=True)
    needed = copies[1] if adapter is None else x if adapter.is_low_rank else None
    kept = residuals(needed, kept_w)
    return out, (*kept, (adapter, u), group_sizes, bias, extra.key)


def _bwd(carried: Any, cotangent: Any, *, layer: Layer) -> tuple[Any, ...]:
    x, w, (adapter, u), group_sizes, bias, key = carried
    x = read_residual(x)
    dy = cotangent[0] if layer.delayed else cotangent
    tokens = dy.ndim - w.ndim + layer.law.batch_dims
    trained = adapter is None
    copies = dy_copies(dy, group_sizes, key, layer, tokens=tokens, for_wgrad=trained)
    v = d_b = None
    if u is not None:
        v, d_b = low_rank_cotangents(dy, u, adapter, group_sizes, layer)
    term = None if v is None else low_rank_dgrad_term(v, adapter, layer)
    dx = _input_cotangent(copies.along_features, x, w, group_sizes, layer, term)
    dw: Any = None
    if adapter is None:
        dw = weight_gradient(x, copies.along_rows, w, group_sizes, layer)
    elif v is not None and d_b is not None:
        dw = low_rank_gradient(x, v, d_b, adapter, group_sizes, layer)
    return dx, dw, None, bias_gradient(dy, bias, group_sizes, layer), None


def _input_cotangent(
    dy: Any,
    x: Any,
    w: Any,
    group_sizes: jax.Array | None,
    layer: Layer,
    low_rank: LowRankTerm | None,
) -> Any:
    """The cotangent of x, of which None is kept where nothing reads it."""
    gradient = partial(input_gradient, dy, w, group_sizes, low_rank=low_rank)
    if isinstance(x, Moved):  # nobody reads padding rows of those that are moved back
        rows = gradient(dataclasses.replace(layer, clear_padding=False), result_spec=None)
        of_map: Any = None
        return Moved(move_rows(rows, x.row_map.inverse), of_map)
    spec = layer.caller[0] if x is None else where_at_rest(x, layer.caller[0])
    return gradient(layer, result_spec=spec)


_linear = differentiable(_fwd, _bwd, _value)

"""The experts: up projection, activation times routing weights, down projection, as one function with one VJP.

    h_r = rows_r Wi_e + bi_e                  e = the row's expert
    a_r = w_r act(h_r)                        w = the row's routing weight; 0 where the row holds no token
    y_r = a_r Wo_e + w_r bo_e

    d_r  = g_r Wo_e^T                         g = the cotangent of y
    dh_r = w_r d_r * the derivative at h_r    dw_r = <d_r, act(h_r)> + <g_r, bo_e>
    dWo_e = sum of a_r^T g_r                  dbo_e = sum of w_r g_r
    dWi_e = sum of rows_r^T dh_r              dbi_e = sum of dh_r                    drows_r = dh_r Wi_e^T

Under a recipe each operand of a GEMM is in its format, as in core's linear/apply.py. What one kernel can activate and
quantize is written in 8 bits only: a, and dh without biases. The gradient of a weight needs no expert output, so no y
is kept; nor is a without a recipe, as the pass that makes dh makes it again. Under `remat="save_8_bits"` the backward
is that at h rounded to 8 bits, which one kernel may write in place of h, and makes a of it where a kernel can.

Rows come in three ways: plain; quantized before they were dispatched, where dWi contracts what has arrived, quantized
again along the rows; or as tokens, plain or quantized, that the GEMMs, or what quantizes or moves their operands, read
in place. Nothing reads padding rows, so nothing is written there. They leave in two: as they are, or on one device as
each token's sum, whose cotangent is read, or quantized, where it is.

A weight may be an `Adapted`: then its own gradient is not made, and h += (rows A) B, y += (a A) B with their
derivatives, as in core's linear/apply.py. These thin GEMMs read rows, a and both cotangents as the GEMMs beside them
do, quantized under a recipe, and A, B and their other operands plain.

Dimension key: P participants, C rows per participant, T tokens, K choices per token, F expert width, D model width, E
experts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from expertmesh import ep
from expertmesh.core.linear.adapted import Adapted, without_base
from expertmesh.core.linear.apply import (
    LowRankTerm,
    add_bias,
    bias_gradient,
    dy_copies,
    forward_gemm,
    input_gradient,
    layer_of,
    low_rank_cotangents,
    low_rank_dgrad_term,
    low_rank_gradient,
    low_rank_term,
    low_rank_u,
    w_copies,
    weight_gradient,
    where_at_rest,
    x_copies,
)
from expertmesh.core.linear.gathered_activation import (
    dgrad_activation_grad_op,
    gathered_activation,
)
from expertmesh.core.linear.grouped_gemm import GROUPED, group_bias_weights_grad_op
from expertmesh.core.linear.layer import (
    DenseState,
    Layer,
    NonDiffOperands,
    barrier,
    read_residual,
    residuals,
)
from expertmesh.core.linear.quantized_activation import (
    quantized_activation,
    quantized_activation_grad,
    quantizes_activation,
    quantizes_activation_grad,
)
from expertmesh.core.ops.activate_rows import activates_at_once
from expertmesh.core.ops.activation import Activation
from expertmesh.core.ops.row_map import RowMap, move_rows
from expertmesh.core.quantization.activate_quantize import Activated, ActivatedGrad
from expertmesh.core.quantization.grouped_requantize import grouped_requantize, move_quantized
from expertmesh.core.quantization.quantize import plain, quantize
from expertmesh.core.quantization.quantize_moved import quantize_moved
from expertmesh.core.quantization.quantize_rows import (
    Copies,
    Formats,
    Moved,
    grouped_quantize,
    grouped_quantize_both,
    per_group,
    quantizes_both_at_once,
    quantizes_moved,
    read_in_place,
)
from expertmesh.core.quantization.quantized import QuantizedArray, is_quantized
from expertmesh.core.quantization.recipe import Float8BlockScaling
from expertmesh.core.specs import mesh_of
from expertmesh.core.vjp import at_rest, differentiable
from expertmesh.flax_moe.config import MoEConfig, dispatches_quantized
from expertmesh.flax_moe.params import EXPERTS, Params
from expertmesh.flax_moe.quantization import Quantization, placed_like
from expertmesh.flax_moe.remat import named

__all__ = ["Dispatched", "adds_rows", "feed_forward", "reads_tokens"]

_Operand = jax.Array | QuantizedArray
_PerLayer = dict[str, NonDiffOperands]
_Output = tuple[jax.Array, dict[str, DenseState] | None]


class Dispatched(NamedTuple):
    """Rows where their experts are.

    Attributes:
      handle: of `expertmesh.ep.prepare`: which row is which token's.
      weights: float32[P, C], each row's routing weight.
      rows: [P, C, D] in `config.dtype`. If the experts read the tokens in place (see `dispatch`) these are the tokens,
        [1, T, D]. The gradient goes through them. If `quantized` is given, nothing reads their values.
      quantized: the rows, or the tokens, in 8 bits, under a recipe with scales per token; else None. It has no
        derivative.
      num_dropped, overflow: as in `MoEOutput`.
      copies: which experts the spare slots hold, under `MoEConfig.num_spare_experts`; else None.
    """

    handle: ep.Handle
    weights: jax.Array
    rows: jax.Array
    quantized: QuantizedArray | None
    num_dropped: jax.Array
    overflow: ep.Overflow | None
    copies: ep.Copies | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The static options of a call.

    Attributes:
      up, down: the layers.
      activation: between them.
      in_place: rows are the tokens; see `reads_tokens`.
      sums: each token's sum of its rows is returned; see `adds_rows`.
      keeps_8_bits: the backward reads h in 8 bits.
    """

    up: Layer
    down: Layer
    activation: Activation
    in_place: bool
    sums: bool
    keeps_8_bits: bool


def feed_forward(
    params: Params,
    dispatched: Dispatched,
    config: MoEConfig,
    *,
    given: Quantization,
    specs: Mapping[str, PartitionSpec],
) -> tuple[jax.Array, Any]:
    """y and the next state, by the formulas at the top of this module.

    Args:
      params: `wi` [E, D, 2, F] and `wo` [E, F, D], each an array or an Adapted, both or none of their biases, and no
        others.
      dispatched: rows and routing weights; of what it has in padding rows nothing is read.
      config: under the recipe in context.
      given: what `wi` and `wo` are given for the recipe.
      specs: where parameters are, for Auto axes under a MeshResource.

    Returns:
      ([P, C, D] in the dtype of the rows; those that hold no token are not to be read, and enter no gradient. Where
      `adds_rows` holds [1, T, D], each token's sum of its rows. The next state of `wi` and `wo` under DelayedScaling,
      else None).

    Raises:
      ValueError: what `expertmesh.core.grouped_dense` refuses.

    Differentiable in `params` (of an Adapted in A and B alone), rows and weights. Kept for the backward: rows (under a
    recipe quantized along the rows, or the quantized tokens where all are here), h, and under a recipe a, quantized
    along the rows, and both weights; under `remat="save_8_bits"` h in 8 bits, and no a that kernels make of it; of an
    Adapted under a recipe rows and a quantized along the features, and its two thin results [P, C, r]. Costs and
    communication are those of two `grouped_dense`; a sharded F costs the backward an all-reduce [P, C], and an adapter
    all-reduces of [P, C, r].
    """
    rows, handle = dispatched.rows, dispatched.handle
    extras = {name: NonDiffOperands(**given.layer(name)) for name in EXPERTS}
    up, down = (
        layer_of(
            "experts",
            GROUPED,
            rows,
            params[name],
            extras[name],
            config.recipe,
            reduce_dtype=config.reduce_dtype,
            specs=(None, specs.get(name), None),
        )
        for name in EXPERTS
    )
    in_place = reads_tokens(params["wi"], handle, config)
    sums = adds_rows(params, handle, config)
    options = _Options(
        up=up,
        down=down,
        activation=config.act,
        in_place=in_place,
        sums=sums,
        keeps_8_bits=config.remat == "save_8_bits",
    )
    y, state = _feed_forward(
        params,
        rows,
        dispatched.weights,
        dispatched.quantized,
        handle,
        extras,
        options=options,
    )
    return y, state and placed_like(jax.lax.stop_gradient(state), given.state)


def reads_tokens(wi: jax.Array, handle: ep.Handle, config: MoEConfig) -> bool:
    """Whether the up projection, or what quantizes or moves its operand, reads tokens where they are: all are here.

    Without a recipe unless it writes more than their rows, and no kernel activates them at once: a copy of them costs
    little beside it, and is read faster.
    """
    recipe = config.recipe
    if not _all_here(handle):
        return False
    if recipe is None:
        E, D, *width = wi.shape
        rows = handle.source.shape[-1]
        fused = config.act.gated and activates_at_once(rows, D, width[-1], E)
        return prod(width) <= D or fused
    if dispatches_quantized(recipe):
        return not config.quantize_backward_combine
    formats = recipe.formats()
    return quantizes_moved(formats.x, formats.x_wgrad)


# F up to which the down projection's gradients read their rows' cotangents where their tokens' are. NVIDIA H100,
# 2026-11-27, 13 shapes: both passes take 0.92 to 1.00 of the time with a copy of the rows, with F of 2048 1.05.
NARROW = 1024


def adds_rows(params: Params, handle: ep.Handle, config: MoEConfig) -> bool:
    """Whether the experts add each token's rows: all are here, and GEMMs or a quantizer alone read their cotangents.

    They are then read where their tokens' are, and not written. Where they are written anyway, it gains nothing.
    """
    if set(params) != set(EXPERTS) or not _all_here(handle):
        return False
    if config.recipe is None:
        wi = params["wi"]
        return wi.shape[-1] <= NARROW and reads_tokens(wi, handle, config)
    formats = config.recipe.formats()
    return quantizes_moved(formats.grad_dgrad, formats.grad_wgrad)


def _all_here(handle: ep.Handle) -> bool:
    """Whether all tokens and all experts are on one device, so that nothing is exchanged."""
    num_tokens = prod(handle.slot.shape[:-1])
    return mesh_of(handle.slot).size <= 1 and handle.row.shape[:2] == (1, num_tokens)


def _down(
    a: _Operand,
    wo: _Operand,
    bias: jax.Array | None,
    weights: jax.Array | None,
    handle: ep.Handle,
    layer: Layer,
    low_rank: LowRankTerm | None = None,
) -> jax.Array:
    """y of a in the format along F."""
    y: jax.Array = forward_gemm(a, wo, handle.group_sizes, None, layer, low_rank=low_rank)
    return add_bias(y, bias, handle.group_sizes, layer, weights)


def _row_copies(
    rows: Any,
    quantized: QuantizedArray | None,
    sizes: jax.Array,
    extra: NonDiffOperands,
    layer: Layer,
    for_wgrad: bool,
    weight: Any,
) -> tuple[Any, Any, Any]:
    """As `x_copies`, also of rows that arrived quantized, or are those of quantized tokens.

    Of tokens the backward makes the copy along the rows; see `_along_rows`.
    """
    tokens = _quantized_tokens(rows, quantized, sizes, layer)
    if tokens is not None:
        reads = not isinstance(weight, Adapted) and _reads(tokens, prod(weight.shape[2:]))
        return tokens if reads else move_quantized(tokens), tokens if for_wgrad else None, None
    if quantized is None:
        copies: tuple[Any, Any, Any] = x_copies(rows, sizes, extra, layer, for_wgrad=for_wgrad)
        return copies
    if not for_wgrad:
        return quantized, None, None
    format, spec = layer.formats.x_wgrad, layer.resolved[0]
    return quantized, grouped_requantize(quantized, sizes, format, spec=spec), None


def _quantized_tokens(
    rows: Any, quantized: QuantizedArray | None, sizes: jax.Array, layer: Layer
) -> Moved | None:
    """The rows of quantized tokens, which are given, or get one scale here; None where there are none."""
    if not isinstance(rows, Moved):
        return None
    if quantized is not None:
        return Moved(quantized, rows.row_map)
    if layer.recipe is None or layer.delayed:
        return None
    formats = layer.formats
    one_scale = per_group(formats.x, formats.x_wgrad)
    return quantize_moved(rows, sizes, formats.x) if one_scale else None


def _reads(tokens: Moved, width: int) -> bool:
    """Whether a GEMM with so many columns takes the rows as tokens."""
    return not tokens.block or read_in_place(tokens.base.format, width)


def _along_rows(x: Any, dy: Any, sizes: jax.Array, layer: Layer) -> tuple[Any, Any]:
    """(x as its weight's gradient contracts it, dy): of tokens in blocks made here, not before dy is there."""
    if not isinstance(x, Moved) or not x.block:
        return x, dy
    x, dy = barrier(x, dy)
    format, spec = layer.formats.x_wgrad, layer.resolved[0]
    return grouped_requantize(x, sizes, format, spec=spec), dy


def _dy_copies(
    dy: jax.Array,
    handle: ep.Handle,
    key: jax.Array | None,
    of: _Options,
    for_wgrad: bool,
    width: int,
) -> Copies:
    """As `dy_copies`, also of rows that are their tokens'; `width`: of the input gradient."""
    rows, sizes, layer = Moved(dy, _rows_of(handle)) if of.sums else dy, handle.group_sizes, of.down
    if not isinstance(rows, Moved) or layer.recipe is None:
        return dy_copies(rows, sizes, key, layer, for_wgrad=for_wgrad)
    along_features, along_rows = layer.formats.grad_dgrad, layer.formats.grad_wgrad
    spec = layer.resolved[2]
    if per_group(along_features, along_rows):
        tokens = quantize_moved(rows, sizes, along_features)
        if not for_wgrad:
            return Copies(move_quantized(tokens), None, None)
        return Copies(tokens, tokens, None)
    if not (for_wgrad and read_in_place(along_features, width)):
        return dy_copies(rows, sizes, key, layer, for_wgrad=for_wgrad)
    copies = grouped_quantize_both(rows, sizes, (None, along_rows), spec=spec)
    return copies._replace(along_features=Moved(quantize(dy, along_features), rows.row_map))


def _placed(rows: jax.Array, handle: ep.Handle, of: _Options) -> Any:
    """The rows as GEMMs take them, which may be given as their tokens."""
    return Moved(rows, _rows_of(handle)) if of.in_place else rows


def _activates_at_once(params: Params, of: _Options) -> bool:
    """Whether one op projects rows, read where their tokens are, and activates them."""
    return of.in_place and _is_plain_up(params) and _fuses(of)


def _quantizes_at_once(params: Params, x: Any, of: _Options) -> bool:
    """Whether one op projects x, activates it and quantizes it in both directions."""
    if of.down.recipe is None or of.down.delayed or not _is_plain_up(params):
        return False
    return quantizes_activation(x, of.activation, _formats_of_a(of.down))


def _quantizes_grad_at_once(of_y: Copies, h: Any, of: _Options) -> bool:
    """Whether one op makes the gradient of the activation, and quantizes it in both directions."""
    if of.up.recipe is None:
        return False
    formats = of.up.formats.grad_dgrad, of.up.formats.grad_wgrad
    return quantizes_activation_grad(of_y.along_features, h, of.activation, formats)


def _is_plain_up(params: Params) -> bool:
    """Whether the up projection has neither a bias nor an adapter."""
    return "wi_bias" not in params and not isinstance(params["wi"], Adapted)


def _fuses(of: _Options) -> bool:
    """Whether there are ops for GEMMs with the activation, or its gradient, behind them."""
    return of.up.recipe is None and of.activation.gated


class _Adapter(NamedTuple):
    """What the backward reads of a frozen weight.

    Attributes:
      low_rank: A and B, if there are any.
      u: the layer's rows times A.
      x: these rows as its GEMM reads them; None where they are made again.
      v, d_b: in the backward, the result's cotangent times B^T, and the cotangent of B.
    """

    low_rank: Adapted
    u: jax.Array | None = None
    x: Any = None
    v: jax.Array | None = None
    d_b: jax.Array | None = None


_Adapters = dict[str, _Adapter | None]


def _through_up(
    params: Params, copies: tuple[Any, _Operand], handle: ep.Handle, of: _Options
) -> tuple[jax.Array, _Adapter | None]:
    """h, and what is kept of an adapter; copies: rows in the format along D, and wi."""
    bias, weight, adapter = params.get("wi_bias"), params["wi"], without_base(params["wi"])
    sizes = handle.group_sizes
    if adapter is None or not adapter.is_low_rank:
        h = forward_gemm(*copies, sizes, bias, of.up)
        return named("hidden", h), None if adapter is None else _Adapter(adapter)
    u = low_rank_u(copies[0], weight, sizes, of.up)
    h = forward_gemm(*copies, sizes, bias, of.up, low_rank=low_rank_term(u, weight, of.up))
    return named("hidden", h), _Adapter(adapter, u, copies[0])


def _through_activation(
    params: Params,
    weights: jax.Array,
    copies: tuple[Any, _Operand],
    handle: ep.Handle,
    extra: NonDiffOperands,
    of: _Options,
    for_wgrad: bool,
    *,
    keeps_h: bool,
) -> tuple[Any, _Adapter | None, tuple[Any, Any, Any]]:
    """(h, which may be None where it is not kept; what is kept of wi's adapter; `x_copies` of a).

    Args:
      copies: as of `_through_up`.
      extra, for_wgrad: of wo.
    """
    h: Any
    activated: Any
    adapter, options = None, dict[str, Any](activation=of.activation)
    operands: Any = (*copies, handle.group_sizes, weights)
    if for_wgrad and _quantizes_at_once(params, copies[0], of):
        operands += (handle.source,)
        options |= dict(format=of.down.formats.x, narrow=_reads_8_bits(of))
        h, a, a_rows = quantized_activation(*operands, **options)
        return named("hidden", h), None, (a, a_rows, None)
    if _activates_at_once(params, of):
        h, activated = gathered_activation(*operands, **options, keeps_h=keeps_h)
        h = named("hidden", h) if keeps_h else h
    else:
        h, adapter = _through_up(params, copies, handle, of)
        activated = Activated(h, weights, handle.source, of.activation)
    options = dict(for_wgrad=for_wgrad)
    return h, adapter, x_copies(activated, handle.group_sizes, extra, of.down, **options)


def _through_down(
    params: Params,
    weights: jax.Array,
    copies: tuple[Any, _Operand],
    handle: ep.Handle,
    of: _Options,
) -> tuple[jax.Array, _Adapter | None]:
    """y, and what is kept of an adapter; copies: a in the format along F, and wo."""
    bias, weight, adapter = params.get("wo_bias"), params["wo"], without_base(params["wo"])
    if adapter is None or not adapter.is_low_rank:
        y = _down(*copies, bias, weights, handle, of.down)
        return named("expert_output", y), None if adapter is None else _Adapter(adapter)
    u = low_rank_u(copies[0], weight, handle.group_sizes, of.down)
    y = _down(*copies, bias, weights, handle, of.down, low_rank_term(u, weight, of.down))
    kept = None if of.down.recipe is None else copies[0]
    return named("expert_output", y), _Adapter(adapter, u, kept)


def _forward(
    params: Params,
    rows: jax.Array,
    weights: jax.Array,
    quantized: QuantizedArray | None,
    handle: ep.Handle,
    extras: _PerLayer,
    *,
    of: _Options,
    for_backward: bool,
) -> tuple[_Output, Any, _Operand, jax.Array, Any, _Operand, _Adapters]:
    """(y and the state, rows along the rows, wi, h, a along the rows, wo, adapters), as the backward reads them."""
    sizes, up, down = handle.group_sizes, of.up, of.down
    trained = {name: for_backward and not isinstance(params[name], Adapted) for name in EXPERTS}
    source = _placed(rows, handle, of)
    wi = params["wi"]
    of_x = source, quantized, sizes, extras["wi"], up, trained["wi"], wi
    x, x_rows, x_state = _row_copies(*of_x)
    wi, kept_wi, wi_state = w_copies(wi, extras["wi"], up, for_dgrad=for_backward)
    of_a = extras["wo"], of, trained["wo"]
    h, of_wi, (a, a_rows, a_state) = _through_activation(
        params, weights, (x, wi), handle, *of_a, keeps_h=for_backward
    )
    wo, kept_wo, wo_state = w_copies(params["wo"], extras["wo"], down, for_dgrad=for_backward)
    y, of_wo = _through_down(params, weights, (a, wo), handle, of)
    y = move_rows(y, _rows_of(handle).inverse) if of.sums else y
    state = {"wi": DenseState(x_state, wi_state), "wo": DenseState(a_state, wo_state)}
    adapters = {"wi": of_wi, "wo": of_wo}
    return (y, state if up.delayed else None), x_rows, kept_wi, h, a_rows, kept_wo, adapters


def _value(*operands: Any, options: _Options) -> _Output:
    return _forward(*operands, of=options, for_backward=False)[0]


def _fwd(*operands: Any, options: _Options) -> tuple[_Output, tuple[Any, ...]]:
    params, _, weights, _, handle, extras = operands
    out, x, wi, h, a, wo, adapters = _forward(*operands, of=options, for_backward=True)
    kept_h = _in_8_bits(h, handle.group_sizes, options) if options.keeps_8_bits else h
    made_again = options.down.recipe is None or _reads_8_bits(options)
    a = None if made_again or adapters["wo"] else a
    x = None if adapters["wi"] else x
    biases = {name: bias for name, bias in params.items() if name not in EXPERTS}
    keys = tuple(extras[name].key for name in EXPERTS)
    kept = (*residuals(x, wi), kept_h, *residuals(a, wo))
    return out, (*kept, adapters, biases, weights, handle, keys)


def _bwd(
    kept: tuple[Any, ...], cotangents: tuple[jax.Array, Any], *, options: _Options
) -> tuple[Any, ...]:
    x, wi, h, a, wo, adapters, biases, weights, handle, keys = kept
    x, a = read_residual(x), read_residual(a)
    (dy, _), sizes, up, down = cotangents, handle.group_sizes, options.up, options.down
    if options.keeps_8_bits:
        h, dy = barrier(h, dy)
        h = h if _reads_8_bits(options) else plain(h, spec=up.resolved[2])
    of_wi, of_wo = adapters["wi"], adapters["wo"]
    of_y = _dy_copies(dy, handle, keys[1], options, of_wo is None, h.shape[-1])
    d_wo: Any = None
    if is_quantized(h) and of_wo is None:
        of_a = Activated(h, weights, handle.source, options.activation)
        a = grouped_quantize_both(of_a, sizes, _formats_of_a(down)).along_rows
    if a is not None and _frees_copies(options):
        d_wo = weight_gradient(a, of_y.along_rows, wo, sizes, down)
        d_wo, of_y = barrier(d_wo, of_y._replace(along_rows=None))
    of_wo = None if of_wo is None else _with_cotangents(of_wo, of_y.along_features, sizes, down)
    copies = partial(dy_copies, group_sizes=sizes, key=keys[0], layer=up, for_wgrad=of_wi is None)
    if of_wo is None and not biases and _fuses(options):
        operands = of_y.along_features, wo, h, weights, handle.source, sizes
        d_h, d_weights, a = dgrad_activation_grad_op(*operands, activation=options.activation)
        of_h = copies(d_h)
    elif not (of_wi or of_wo or biases) and _quantizes_grad_at_once(of_y, h, options):
        wo, of_d = barrier(wo, of_y.along_features)
        of: dict[str, Any] = dict(activation=options.activation, format=up.formats.grad_dgrad)
        of_h = quantized_activation_grad(of_d, wo, h, weights, handle.source, sizes, **of)
        d_weights = of_h.d_weights
    else:
        spec, term = _spec_of_activation(h), _dgrad_term(of_wo, down)
        d_a = input_gradient(of_y.along_features, wo, sizes, down, result_spec=spec, low_rank=term)
        source = ActivatedGrad(h, weights, handle.source, options.activation, d_a)
        d_h, of_h, d_weights, a = _hidden_gradient(source, a, copies, sizes, up, bool(biases))
    if of_wo is None:
        d_wo = weight_gradient(a, of_y.along_rows, wo, sizes, down) if d_wo is None else d_wo
    else:
        # Made before the rows' cotangents, so that dy and a are then done with.
        of_a = a if of_wo.x is None else of_wo.x
        d_wo, of_h = barrier(_adapter_cotangent(of_a, of_wo, sizes, down), of_h)
    d_rows, d_wi = _up_gradients(of_h, x, wi, of_wi, handle, options)
    d_params: dict[str, Any] = {"wi": d_wi, "wo": d_wo}
    if biases:
        bo = biases["wo_bias"]
        d_params["wi_bias"] = bias_gradient(d_h, biases["wi_bias"], sizes, up)
        d_params["wo_bias"] = bias_gradient(dy, bo, sizes, down, weights)
        specs = down.resolved[2], GROUPED.bias_spec(down.resolved[1]), None
        d_weights += group_bias_weights_grad_op(dy, bo, sizes, operand_specs=specs)
    return d_params, d_rows, d_weights, None, None, None


def _formats_of_a(down: Layer) -> Formats:
    """Of the copies along F and along the rows, under a recipe."""
    return down.formats.x, down.formats.x_wgrad


def _in_8_bits(h: _Operand, sizes: jax.Array, of: _Options) -> QuantizedArray:
    """h as the backward reads it: in the format of a where kernels take that, else in blocks of 128."""
    if isinstance(h, QuantizedArray):
        return h
    format = of.down.formats.x if _reads_8_bits(of) else Float8BlockScaling().formats().x
    kept: QuantizedArray = grouped_quantize(h, sizes, format, spec=of.up.resolved[2])
    return named("hidden", kept)


def _reads_8_bits(of: _Options) -> bool:
    """Whether what makes a again, and dh, reads h in 8 bits as it is kept."""
    if not of.keeps_8_bits or of.down.recipe is None:
        return False
    return of.activation.gated and quantizes_both_at_once(*_formats_of_a(of.down))


def _frees_copies(of: _Options) -> bool:
    """Whether a weight's gradient is made before the cotangent that goes on, so that its operands are done with.

    Those are copies under a recipe. Where tokens are elsewhere, the cotangent may go first, to travel meanwhile.
    """
    return of.in_place and of.up.recipe is not None


def _hidden_gradient(
    source: ActivatedGrad,
    a: Any,
    quantized: Callable[[Any], Copies],
    sizes: jax.Array,
    layer: Layer,
    plain: bool,
) -> tuple[Any, Any, jax.Array, Any]:
    """(dh where it is needed `plain`, its copies, dw, a as its weight's gradient contracts it)."""
    if layer.recipe is not None and not plain:
        copies = quantized(source)
        return None, copies, copies.d_weights, a
    d_h, d_weights, again = source.with_activation(sizes, layer.resolved[2])
    return d_h, quantized(d_h), d_weights, again if a is None else a


def _with_cotangents(adapter: _Adapter, dy: Any, sizes: jax.Array, layer: Layer) -> _Adapter:
    """The adapter with its v and dB, if it has A and B."""
    if adapter.u is None:
        return adapter
    v, d_b = low_rank_cotangents(dy, adapter.u, adapter.low_rank, sizes, layer)
    return adapter._replace(v=v, d_b=d_b)


def _dgrad_term(adapter: _Adapter | None, layer: Layer) -> LowRankTerm | None:
    """The part of an input gradient that goes through an adapter, if there is one."""
    if adapter is None or adapter.v is None:
        return None
    return low_rank_dgrad_term(adapter.v, adapter.low_rank, layer)


def _adapter_cotangent(x: Any, adapter: _Adapter, sizes: jax.Array, layer: Layer) -> Adapted | None:
    """Of A and B, x in any format; None where there are none."""
    if adapter.v is None or adapter.d_b is None:
        return None
    inner = adapter.v, adapter.d_b
    made: Adapted = low_rank_gradient(x, *inner, adapter.low_rank, sizes, layer)
    return made


def _up_gradients(
    of_h: Any,
    x: Any,
    wi: _Operand,
    adapter: _Adapter | None,
    handle: ep.Handle,
    of: _Options,
) -> tuple[jax.Array, Any]:
    """The cotangents of the rows and of wi; of_h: copies of dh."""
    d_wi: Any
    sizes, row_map = handle.group_sizes, _rows_of(handle)
    if adapter is not None:
        adapter = _with_cotangents(adapter, of_h.along_features, sizes, of.up)
        d_wi = _adapter_cotangent(adapter.x, adapter, sizes, of.up)
        d_wi, of_h = barrier(d_wi, of_h)  # The rows are then done with, when others are made.
        x = adapter.x
    spec = None if of.in_place or x is None else where_at_rest(x, None)
    term, along_n = _dgrad_term(adapter, of.up), of_h.along_features
    if adapter is None:
        d_wi = weight_gradient(*_along_rows(x, of_h.along_rows, sizes, of.up), wi, sizes, of.up)
        if _frees_copies(of):
            d_wi, along_n = barrier(d_wi, along_n)
    d_rows = input_gradient(along_n, wi, sizes, of.up, result_spec=spec, low_rank=term)
    if of.in_place:
        d_rows = move_rows(d_rows, row_map.inverse)
    return d_rows, d_wi


def _rows_of(handle: ep.Handle) -> RowMap:
    """Which rows are which tokens', where all are here."""
    return RowMap(handle.row, handle.source)


def _spec_of_activation(h: _Operand) -> PartitionSpec | None:
    """[P, C, F] where h is, as far as its type says so."""
    spec = at_rest(h.data if isinstance(h, QuantizedArray) else h, None)
    return spec and PartitionSpec(spec[0], spec[1], spec[-1])


_feed_forward = differentiable(_fwd, _bwd, _value)

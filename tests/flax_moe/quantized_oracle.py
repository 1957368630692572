"""The quantized block and its gradients in float64 NumPy, the rows of one expert on one participant at a time.

Each operand of each product is rounded by itself; nothing is stored in 8 bits or exchanged, and of the packages only
the recipe's table of formats is read. Rows are in the order of `Exchange`: blocks along them begin with each expert.
"""

import types
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ep.exchange_oracle import Exchange
from expertmesh.core import Float8BlockScaling
from expertmesh.flax_moe import MoEConfig
from flax_moe.moe_oracle import Data, Result, activate, losses, route

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rounded(x, format, along, across=0, multiplier=None):
    """x as its 8 or 4 bits and scales say it is, float64.

    Args:
      format: a TensorFormat; without blocks all of x has one scale.
      along: the dimension that the product contracts.
      across: the other one of a block with two.
      multiplier: instead of one made of the amax.
    """
    x = np.asarray(x).astype(np.float32)
    if format.hadamard:
        x = _rotated(x, along)
    if format.block is None:
        return _scaled(x, _multiplier(np.abs(x).max(initial=0), format, multiplier), format.dtype)
    steps = [1] * x.ndim
    steps[across], steps[along] = format.block
    counts = [-(-n // s) for n, s in zip(x.shape, steps, strict=True)]
    padding = [(0, c * s - n) for n, s, c in zip(x.shape, steps, counts, strict=True)]
    blocks = np.pad(x, padding).reshape(
        [n for pair in zip(counts, steps, strict=True) for n in pair]
    )
    amax = np.abs(blocks).max(axis=tuple(range(1, 2 * x.ndim, 2)), keepdims=True)
    if format.scale == "float8_e4m3fn":
        values = _two_levels(blocks, amax, np.abs(x).max(initial=0))
    else:
        values = _scaled(blocks, _multiplier(amax, format), format.dtype)
    values = values.reshape([c * s for c, s in zip(counts, steps, strict=True)])
    return values[tuple(slice(n) for n in x.shape)]


def multiplier_of_tokens(x, has_row, format):
    """Where all tokens are on one device, they have one scale; None if the format has blocks."""
    return _multiplier(np.abs(x[has_row]).max(), format) if format.block is None else None


def _multiplier(amax, format, given=None):
    if given is not None:
        return np.float32(given)
    most = np.float32(float(ml_dtypes.finfo(format.dtype).max))
    amax = np.where(amax > 0, amax, most)
    if format.scale == "float8_e8m0fnu":
        return 2.0 ** -np.ceil(np.log2(amax.astype(np.float64) / most))
    multiplier = most / amax.astype(np.float32)
    if format.scale == "power_of_2":
        return 2.0 ** np.floor(np.log2(multiplier.astype(np.float64)))
    return multiplier


def _scaled(x, multiplier, dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    multiplier = np.asarray(multiplier, np.float32)
    codes = np.clip(x * multiplier, -most, most).astype(dtype)
    return codes.astype(np.float64) * (np.float32(1) / multiplier)


def _two_levels(blocks, amax, tensor_amax):
    g = np.float32(6 * 448) / np.float32(tensor_amax) if tensor_amax else np.float32(1)
    scale = np.minimum(amax / np.float32(6) * g, 448).astype("float8_e4m3fn").astype(np.float32)
    multiplier = np.divide(g, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.clip(blocks * multiplier, -6, 6).astype("float4_e2m1fn")
    return codes.astype(np.float64) * scale / g


def _rotated(x, along):
    h = np.array([[1.0]])
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    h = (np.array(SIGNS)[:, None] * h / 4).astype(np.float32)
    x = np.moveaxis(x, along, -1)
    x = (x.reshape(*x.shape[:-1], -1, 16) @ h).reshape(x.shape)
    return np.moveaxis(x, -1, along)


class Layer:
    """One weight [K, *N] and the products with it; `given` are multipliers of x and the weight, or None.

    `of_dy`: that of the cotangent, or None.
    """

    def __init__(self, w, formats, given=(None, None), of_dy=None):
        self.w, self.formats, self.given, self.of_dy = w, formats, given, of_dy

    def forward(self, x):
        """x[..., K] as it enters the product, and the product."""
        last = self.w.ndim - 1
        x = rounded(x, self.formats.x, x.ndim - 1, 0, self.given[0])
        return x, np.tensordot(x, rounded(self.w, self.formats.weight, 0, last, self.given[1]), 1)

    def backward(self, x, dy):
        """Gradients of x[..., K] and of the weight; x is what the weight's gradient is made of."""
        formats, dims, last = self.formats, list(range(x.ndim - 1)), self.w.ndim - 1
        tokens = x.ndim - 2
        w = rounded(self.w, formats.weight_dgrad, last, 0, self.given[1])
        of_n = list(range(x.ndim - 1, dy.ndim)), list(range(1, self.w.ndim))
        of_features = rounded(dy, formats.grad_dgrad, dy.ndim - 1, 0, self.of_dy)
        dx = np.tensordot(of_features, w, of_n)
        x = rounded(
            _whole_blocks(x, formats.x_wgrad, tokens), formats.x_wgrad, tokens, 0, self.given[0]
        )
        dy = _whole_blocks(dy, formats.grad_wgrad, tokens)
        dy = rounded(dy, formats.grad_wgrad, tokens, 0, self.of_dy)
        return dx, np.tensordot(x, dy, (dims, dims))


def _whole_blocks(x, format, dim):
    """x with rows of zeros at its end: what rotates blocks of 16 needs them."""
    more = -x.shape[dim] % 16 if format.hadamard else 0
    return np.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)])


def run(
    data: Data,
    config: MoEConfig,
    blocks,
    num_ranks: int = 1,
    multipliers: Mapping[str, tuple] = types.MappingProxyType({}),
) -> Result:
    """The block and the gradients of sum(y * dy) + aux_loss + z_loss.

    Args:
      blocks: the tokens of each participant.
      num_ranks: participants of an EP group.
      multipliers: layer -> that of x, and of the weight: those of each expert for `wi` and `wo`.
    """
    params = {name: w.astype(np.float64) for name, w in data.params.items()}
    D, E, formats = data.x.shape[-1], config.num_experts, config.recipe.formats()
    params.setdefault("wi_bias", np.zeros((E, *params["wi"].shape[2:])))
    params.setdefault("wo_bias", np.zeros((E, D)))
    x, dy = (a.astype(np.float64).reshape(-1, D) for a in (data.x, data.dy))
    logits = x @ params["gate_kernel"]
    routed = [route(row, config) for row in logits]
    chosen = np.array([r[0] for r in routed])
    exchange = Exchange(
        chosen, blocks, num_ranks, E, len(x) * chosen.shape[1] * config.row_alignment
    )
    y, d_x, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros(chosen.shape)
    d = {name: np.zeros_like(w) for name, w in params.items()}
    for e, tokens, ks in _groups(exchange):
        layers = []
        for name in ("wi", "wo"):
            of_x, of_weights = multipliers.get(name, (None, None))
            of_weight = None if of_weights is None else of_weights[e]
            layers.append(Layer(params[name][e], formats, (of_x, of_weight)))
        weights = np.array([routed[t][1][k] for t, k in zip(tokens, ks, strict=True)])
        rows, d_weights[tokens, ks], gradients = feed_forward(
            x[tokens],
            dy[tokens],
            weights,
            layers,
            params["wi_bias"][e],
            params["wo_bias"][e],
            config,
            sent_only=config.recipe.formats().x.block in ((1, 32), (1, 128)),
        )
        np.add.at(y, tokens, rows)
        np.add.at(d_x, tokens, gradients[0])
        for name, gradient in zip(("wi", "wo", "wi_bias", "wo_bias"), gradients[1:], strict=True):
            d[name][e] += gradient
    shape = data.x.shape
    y, d_x = y.reshape(shape), d_x.reshape(shape)
    if config.shared_expert_dim is not None:
        layers = [
            Layer(params[name], formats, multipliers.get(name, (None, None)))
            for name in ("shared_wi", "shared_wo")
        ]
        more, _, (d_shared, d["shared_wi"], d["shared_wo"], *_) = feed_forward(
            data.x.astype(np.float64), data.dy.astype(np.float64), 1, layers, 0, 0, config
        )
        y, d_x = y + more, d_x + d_shared
    counts = np.bincount(chosen.ravel(), minlength=E)
    aux, z, d_losses = losses(logits, counts, config)
    d_logits = np.stack([w @ r[2] for w, r in zip(d_weights, routed, strict=True)]) + d_losses
    d["gate_kernel"] = x.T @ d_logits
    d_x = d_x + (d_logits @ params["gate_kernel"].T).reshape(shape)
    return Result(y, aux, z, counts, {name: d[name] for name in data.params}, d_x)


def _groups(exchange: Exchange):
    """(expert, tokens, ks) of the rows of each expert on each participant."""
    for p, rows in enumerate(exchange.rows):
        live = [row for row in rows if row is not None]
        for e in range(p % exchange.R * exchange.e, (p % exchange.R + 1) * exchange.e):
            mine = [(t, k) for t, k in live if exchange.topk[t, k] == e]
            if mine:
                yield e, *np.array(mine).T


def _activation_gradient(h, d_a, activation):
    """By central differences; h [2, ...] where the activation is gated."""
    units = np.eye(2).reshape(2, 2, *[1] * (h.ndim - 1)) if activation.gated else [1.0]
    slopes = [
        (activate(h + 1e-6 * u, activation) - activate(h - 1e-6 * u, activation)) / 2e-6
        for u in units
    ]
    return d_a * (np.stack(slopes) if activation.gated else slopes[0])


def _kept(h, config):
    """h in 8 bits as a backward keeps it, and whether the activation is made again of them."""
    recipe = config.recipe
    formats = None if recipe is None else recipe.formats()
    own = formats is not None and formats.x == formats.x_wgrad and formats.x.block is not None
    own = own and config.act.gated and formats.x.dtype.startswith("float8")
    format = formats.x if own else Float8BlockScaling().formats().x
    return rounded(h, format, h.ndim - 1), own or recipe is None


def feed_forward(x, dy, weights, layers, bi, bo, config, sent_only=False):
    """Weighted outputs, gradients of the weights, and of x, both weights and both biases.

    Args:
      sent_only: for the gradient of `wi` there is x as it enters the product, and nothing else.
    """
    wi, wo = layers
    gated = config.act.gated
    weights = np.asarray(weights, np.float64)[..., None]
    sent, h = wi.forward(x)
    h = h + bi
    of_unit = np.moveaxis(h, -2, 0) if gated else h
    a = activate(of_unit, config.act)
    _, out = wo.forward(a * weights)
    again = a
    if config.remat == "save_8_bits":
        kept, made_again = _kept(h, config)
        of_unit = np.moveaxis(kept, -2, 0) if gated else kept
        a = activate(of_unit, config.act)
        again = a if made_again else again
    d_a, d_wo = wo.backward(again * weights, dy)
    d_weights = np.sum(d_a * a, axis=-1) + np.sum(dy * bo, axis=-1)
    d_h = _activation_gradient(of_unit, d_a * weights, config.act)
    d_h = np.moveaxis(d_h, 0, -2) if gated else d_h
    d_x, d_wi = wi.backward(sent if sent_only else x, d_h)
    y = out + bo * weights
    tokens = tuple(range(x.ndim - 1))
    return y, d_weights, (d_x, d_wi, d_wo, d_h.sum(tokens), (dy * weights).sum(tokens))

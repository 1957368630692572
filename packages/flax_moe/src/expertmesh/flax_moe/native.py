"""The same MoE block in plain JAX: top-k, sort, all-to-all, `ragged_dot`. The baseline of every comparison.

Uses no op of `expertmesh.core` and nothing of `expertmesh.ep`. Never drops a token.

    route -> sort choices by expert -> exchange over ep -> sort by local expert -> ragged_dot, activation, ragged_dot
          -> unsort -> exchange back -> unsort -> weighted sum

Dimension key, on one device: T tokens, K choices per token, E experts, R devices of the EP axis, e = E / R local
experts, N = T K rows to send, C rows per pair of devices (padded exchange), M rows received, D model width, F expert
width.
"""

import functools
from collections.abc import Callable, Mapping
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.params import (
    Params,
    check_params,
    initializers,
    param_shapes,
    whole_params,
)

__all__ = ["EXCHANGES", "NativeMoEBlock", "native_moe"]

_Mesh = Mesh | AbstractMesh
_Experts = Callable[[jax.Array, jax.Array], jax.Array]  # of rows and group sizes
_Way = tuple[jax.Array, ...]  # offsets and sizes of a `ragged_all_to_all`

# The fields of MoEOutput but the last two.
_Fields = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

EXCHANGES = ("auto", "padded", "ragged")

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


def native_moe(
    params: Mapping[str, jax.Array],
    x: jax.Array,
    config: MoEConfig,
    mesh: _Mesh | None = None,
    *,
    fsdp_axis: str = "fsdp",
    exchange: str = "auto",
) -> MoEOutput:
    """`expertmesh.flax_moe.moe` in plain JAX.

    Args:
      params: the tree of `init_params`.
      x: float[..., D]. On a mesh its first dimension is split over (fsdp, ep).
      config: see MoEConfig. `capacity_factor` must be None, the scores softmax without groups or factor, the activation
        a name, `ep_axis` one axis. Shared or null experts, latents, a loss per sequence and recipes are refused.
        Options that only change how it is computed (`alignment`, `transport`, `num_chunks`, `remat`, ...) have no
        effect.
      mesh: has the axis `config.ep_axis` (default "ep"), `fsdp_axis`, or both. None: the mesh in x's type or in
        context; without one, a single device.
      fsdp_axis: the axis that D of the expert weights is split over and gathered from.
      exchange: "ragged" `ragged_all_to_all`; "padded" `all_to_all` of the worst case; "auto" ragged unless on CPU,
        where XLA has no such collective.

    Returns:
      MoEOutput.

    Raises:
      ValueError: a parameter that is missing, unknown or of the wrong shape, an option that it lacks, an unknown
        exchange, a first dimension or E that the mesh does not divide, or neither axis in the mesh.

    Costs per call two exchanges of T K rows over ep (padded: R min(T min(K, e)) of them per device), one gather of the
    weights over fsdp, and all-reduces of [E] vectors.
    """
    MoEConfig.check("native_moe", config=config)
    _check_options(config, exchange)
    params = whole_params("native_moe", params)
    check_params("native_moe", params, x.shape[-1], config, config.num_experts)
    mesh = _find_mesh(mesh, x)
    if mesh is None:
        return MoEOutput(
            *_on_device(params, x, config=config, axes=(), ep_axis=None, fsdp_axis=None)
        )
    ragged = exchange == "ragged" or exchange == "auto" and _platform(mesh) != "cpu"
    return _on_mesh(params, x, config, mesh, fsdp_axis=fsdp_axis, ragged=ragged)


def _check_options(config: MoEConfig, exchange: str) -> None:
    if config.capacity_factor is not None:
        raise ValueError(
            "native_moe: capacity_factor must be None, it never drops; "
            f"got capacity_factor={config.capacity_factor}; use moe"
        )
    if (config.score_function, config.num_groups, config.scaling_factor) != ("softmax", None, 1):
        raise ValueError(
            "native_moe: the router must be softmax without groups or scaling factor; "
            f"got {config.router}; use moe"
        )
    for name in _lacking(config):
        raise ValueError(
            f"native_moe: {name} must be left as it is; got {name}={getattr(config, name)}; use moe"
        )
    if isinstance(config.ep_axis, tuple):
        raise ValueError(
            f"native_moe: ep_axis must be the name of one axis; got ep_axis={config.ep_axis}; use moe"
        )
    if exchange not in EXCHANGES:
        raise ValueError(
            f"native_moe: exchange must be one of {', '.join(EXCHANGES)}; got exchange={exchange!r}; use 'auto'"
        )


def _lacking(config: MoEConfig) -> list[str]:
    """The options of a config that the block lacks."""
    asked = {
        "activation": config.activation not in _ACTIVATIONS,
        "latent_dim": config.latent_dim is not None,
        "num_null_experts": config.num_null_experts > 0,
        "shared_expert_dim": config.shared_expert_dim is not None,
        "use_gate": not config.use_gate,
        "use_expert_bias": config.use_expert_bias,
        "aux_loss_per_sequence": config.aux_loss_per_sequence,
        "recipe": config.recipe is not None,
    }
    return [name for name, wanted in asked.items() if wanted]


def _on_mesh(
    params: Params, x: jax.Array, config: MoEConfig, mesh: _Mesh, *, fsdp_axis: str, ragged: bool
) -> MoEOutput:
    ep_axis = str(config.ep_axis or "ep")  # one axis: _check_options
    axes = _token_axes(mesh, fsdp_axis, ep_axis)
    _check_divisible(mesh, axes, ep_axis, x, config)
    fsdp = fsdp_axis if fsdp_axis in axes and x.shape[-1] % mesh.shape[fsdp_axis] == 0 else None
    ep = ep_axis if ep_axis in axes else None
    in_specs = ({name: _spec_of(name, ep, fsdp) for name in params}, PartitionSpec(axes))
    body = functools.partial(
        _on_device, config=config, axes=axes, ep_axis=ep, fsdp_axis=fsdp, ragged=ragged
    )
    shard = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(PartitionSpec(axes), *[PartitionSpec()] * 5, PartitionSpec(axes)),
        check_vma=False,
    )
    return MoEOutput(*shard(*_place((params, x), in_specs, mesh)))


def _find_mesh(mesh: _Mesh | None, x: jax.Array) -> _Mesh | None:
    if mesh is None:
        mesh = jax.typeof(x).sharding.mesh
        mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return None if mesh.empty or AxisType.Manual in mesh.axis_types else mesh


def _token_axes(mesh: _Mesh, fsdp_axis: str, ep_axis: str) -> tuple[str, ...]:
    axes = tuple(axis for axis in (fsdp_axis, ep_axis) if axis in mesh.axis_names)
    if not axes:
        raise ValueError(
            f"native_moe: the mesh must have an axis {fsdp_axis!r} or {ep_axis!r}; "
            f"got mesh axes {mesh.axis_names}; rename them, or pass fsdp_axis and config.ep_axis"
        )
    return axes


def _spec_of(name: str, ep: str | None, fsdp: str | None) -> PartitionSpec:
    """Where a parameter is."""
    specs = {
        "gate_kernel": PartitionSpec(),
        "gate_bias": PartitionSpec(),
        "wi": PartitionSpec(ep, fsdp),
        "wo": PartitionSpec(ep, None, fsdp),
        "wi_bias": PartitionSpec(ep),
        "wo_bias": PartitionSpec(ep),
    }
    return specs[name]


def _check_divisible(
    mesh: _Mesh,
    axes: tuple[str, ...],
    ep_axis: str,
    x: jax.Array,
    config: MoEConfig,
) -> None:
    devices = prod(mesh.shape[axis] for axis in axes)
    if x.ndim < 2 or x.shape[0] % devices:
        raise ValueError(
            f"native_moe: the first dimension of x must be divisible by the {devices} devices of {axes}; "
            f"got x.shape={x.shape}; pad the batch"
        )
    ranks = mesh.shape.get(ep_axis, 1)
    if config.num_experts % ranks:
        raise ValueError(
            f"native_moe: num_experts must be divisible by the size of {ep_axis!r}; "
            f"got num_experts={config.num_experts}, size {ranks}; change one of them"
        )


def _platform(mesh: _Mesh) -> str:
    if isinstance(mesh, Mesh):
        return str(mesh.devices.flat[0].platform)
    return jax.default_backend()


def _place[Tree](values: Tree, specs: object, mesh: _Mesh) -> Tree:
    """Lays out the operands over Explicit axes, where shard_map does not reshard."""
    if AxisType.Explicit in mesh.axis_types:
        values = jax.tree.map(
            lambda v, s: jax.sharding.reshard(v, NamedSharding(mesh, s)), values, specs
        )
    return values


def _on_device(
    params: Params,
    x: jax.Array,
    *,
    config: MoEConfig,
    axes: tuple[str, ...],
    ep_axis: str | None,
    fsdp_axis: str | None,
    ragged: bool = False,
) -> _Fields:
    """The fields of MoEOutput, on one device's tokens and experts inside a shard_map over `axes` (none: on all)."""
    x_TD = x.reshape(-1, x.shape[-1])
    logits_TE = x_TD.astype(jnp.float32) @ params["gate_kernel"].astype(jnp.float32)
    if "gate_bias" in params:
        logits_TE += params["gate_bias"].astype(jnp.float32)
    weights_TK, idx_TK = _top_k(logits_TE, config)
    experts = functools.partial(_experts, _gathered(params, config.dtype, fsdp_axis), config)
    rows_TD = x_TD.astype(config.dtype)
    if config.weigh_inputs:
        rows_TD = (x_TD * weights_TK).astype(config.dtype)  # K = 1
        weights_TK = jnp.ones_like(weights_TK)
    y_TD = _route_through(experts, rows_TD, idx_TK, weights_TK, config.num_experts, ep_axis, ragged)
    counts_E = _psum(_histogram(idx_TK, config.num_experts), axes)
    aux, z = _losses(logits_TE, counts_E, config, axes)
    entropy = _entropy(jax.lax.stop_gradient(logits_TE), axes)
    idx = idx_TK.reshape(*x.shape[:-1], config.top_k)
    y = y_TD.reshape(x.shape).astype(x.dtype)
    return y, aux, z, counts_E, jnp.int32(0), entropy, idx


def _top_k(logits_TE: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    if config.use_pre_softmax:
        return jax.lax.top_k(jax.nn.softmax(logits_TE), config.top_k)
    top_TK, idx_TK = jax.lax.top_k(logits_TE, config.top_k)
    return jax.nn.softmax(top_TK), idx_TK


def _histogram(idx: jax.Array, size: int) -> jax.Array:
    return jnp.zeros(size, jnp.int32).at[idx].add(1, mode="drop")


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _losses(
    logits_TE: jax.Array, counts_E: jax.Array, config: MoEConfig, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss and the z-loss over the tokens of all devices."""
    E, total = logits_TE.shape[1], _num_tokens(logits_TE, axes)
    probs_E = _psum(jnp.sum(jax.nn.softmax(logits_TE), axis=0), axes)
    balance = jnp.sum(probs_E * counts_E.astype(jnp.float32)) * E / (config.top_k * total**2)
    z = _psum(jnp.sum(jax.nn.logsumexp(logits_TE, axis=-1) ** 2), axes) / total
    return config.aux_loss_coeff * balance, config.z_loss_coeff * z


def _entropy(logits_TE: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The mean over the tokens of all devices."""
    log_q_TE = jax.nn.log_softmax(logits_TE)
    entropy = -jnp.sum(jnp.exp(log_q_TE) * jnp.maximum(log_q_TE, -1e30))
    return _psum(entropy, axes) / _num_tokens(logits_TE, axes)


def _num_tokens(logits_TE: jax.Array, axes: tuple[str, ...]) -> float:
    """Of all devices, at least 1."""
    # A float: its square may be more than an int32 holds.
    return float(max(logits_TE.shape[0] * (jax.lax.axis_size(axes) if axes else 1), 1))


def _gathered(params: Params, dtype: DTypeLike, fsdp_axis: str | None) -> Params:
    """Expert weights in the compute dtype, whole along D; the gather's transpose scatters the gradient."""
    gate = ("gate_kernel", "gate_bias")
    params = {name: w.astype(dtype) for name, w in params.items() if name not in gate}
    if fsdp_axis is not None:
        for name, dim in (("wi", 1), ("wo", 2)):
            params[name] = jax.lax.all_gather(params[name], fsdp_axis, axis=dim, tiled=True)
    return params


def _experts(params: Params, config: MoEConfig, x_MD: jax.Array, sizes_e: jax.Array) -> jax.Array:
    """The experts' feed-forward on rows sorted by local expert."""
    rows = x_MD.shape[0]
    num_local, D, _, F = params["wi"].shape
    wi = params["wi"].reshape(num_local, D, 2 * F)
    h_M2F = jax.lax.ragged_dot(x_MD, wi, sizes_e).reshape(rows, 2, F)
    expert_M = None
    if "wi_bias" in params:
        expert_M = jnp.repeat(jnp.arange(num_local), sizes_e, total_repeat_length=rows)
        h_M2F += params["wi_bias"][expert_M]
    h_M2F = h_M2F.astype(jnp.float32)
    a_MF = (_ACTIVATIONS[str(config.activation)](h_M2F[:, 0]) * h_M2F[:, 1]).astype(x_MD.dtype)
    y_MD = jax.lax.ragged_dot(a_MF, params["wo"], sizes_e)
    return y_MD if expert_M is None else y_MD + params["wo_bias"][expert_M]


def _route_through(
    experts: _Experts,
    x_TD: jax.Array,
    idx_TK: jax.Array,
    weights_TK: jax.Array,
    num_experts: int,
    ep_axis: str | None,
    ragged: bool,
) -> jax.Array:
    T, K = idx_TK.shape
    order_N = jnp.argsort(idx_TK.reshape(-1), stable=True)
    rows_ND = x_TD[order_N // K]
    sizes_E = _histogram(idx_TK, num_experts)
    if ep_axis is None:
        y_ND = experts(rows_ND, sizes_E)
    else:
        exchange = _ragged if ragged else _padded
        y_ND = exchange(experts, rows_ND, sizes_E, T, K, ep_axis)
    y_TKD = y_ND[jnp.argsort(order_N)].reshape(T, K, x_TD.shape[-1])
    return jnp.einsum("tk,tkd->td", weights_TK, y_TKD.astype(jnp.float32))


def _by_expert(
    experts: _Experts, rows_MD: jax.Array, expert_M: jax.Array, num_local: int
) -> jax.Array:
    """Sorts received rows by local expert (`num_local` for unused rows), computes, and restores their order."""
    order_M = jnp.argsort(expert_M, stable=True)
    y_MD = experts(rows_MD[order_M], _histogram(expert_M, num_local))
    return y_MD[jnp.argsort(order_M)]


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes, axis=-1) - sizes


def _padded(
    experts: _Experts, rows_ND: jax.Array, sizes_E: jax.Array, T: int, K: int, ep_axis: str
) -> jax.Array:
    """One `all_to_all` each way, with room for the most rows that one device can send to another."""
    R = jax.lax.axis_size(ep_axis)
    sizes_Re = sizes_E.reshape(R, -1)
    num_local = sizes_Re.shape[1]
    C, N = T * min(K, num_local), rows_ND.shape[0]
    sent_R = sizes_Re.sum(axis=1)
    slot_C = jnp.arange(C)
    row_RC = _starts(sent_R)[:, None] + slot_C
    live_RC = slot_C < sent_R[:, None]
    send_RCD = rows_ND.at[jnp.where(live_RC, row_RC, N)].get(mode="fill", fill_value=0)
    recv_RCD = jax.lax.all_to_all(send_RCD, ep_axis, 0, 0, tiled=True)
    got_Re = jax.lax.all_to_all(sizes_Re, ep_axis, 0, 0, tiled=True)
    expert_RC = jnp.sum(slot_C[:, None] >= jnp.cumsum(got_Re, axis=1)[:, None], axis=2)
    y_MD = _by_expert(experts, recv_RCD.reshape(R * C, -1), expert_RC.reshape(-1), num_local)
    back_RCD = jax.lax.all_to_all(y_MD.reshape(R, C, -1), ep_axis, 0, 0, tiled=True)
    rank_N = jnp.repeat(jnp.arange(R), sent_R, total_repeat_length=N)
    y_ND: jax.Array = back_RCD[rank_N, jnp.arange(N) - _starts(sent_R)[rank_N]]
    return y_ND


def _ragged(
    experts: _Experts, rows_ND: jax.Array, sizes_E: jax.Array, T: int, K: int, ep_axis: str
) -> jax.Array:
    """One `ragged_all_to_all` each way; what a device receives is packed by source."""
    R, rank = jax.lax.axis_size(ep_axis), jax.lax.axis_index(ep_axis)
    sizes_Re = sizes_E.reshape(R, -1)
    num_local = sizes_Re.shape[1]
    N, M = rows_ND.shape[0], R * T * min(K, num_local)
    counts_RRe = jax.lax.all_gather(sizes_Re, ep_axis)
    pairs_RR = counts_RRe.sum(axis=2)  # rows from source i to destination j
    sent_R, got_R = pairs_RR[rank], pairs_RR[:, rank]
    place_R = _starts(pairs_RR.T).T[rank]  # where this device's rows start at each destination
    back_at_R = _starts(pairs_RR)[:, rank]  # where this device's rows start at each source
    there = _starts(sent_R), sent_R, place_R, got_R
    back = _starts(got_R), got_R, back_at_R, sent_R
    recv_MD = _move(rows_ND, there, back, M, ep_axis)
    ends = jnp.cumsum(counts_RRe[:, rank].reshape(-1))
    segment_M = jnp.searchsorted(ends, jnp.arange(M), side="right")
    expert_M = jnp.where(segment_M < R * num_local, segment_M % num_local, num_local)
    return _move(_by_expert(experts, recv_MD, expert_M, num_local), back, there, N, ep_axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _move(x: jax.Array, there: _Way, back: _Way, rows: int, axis: str) -> jax.Array:
    """`ragged_all_to_all` into `rows` rows, zero where nothing arrives; the gradient takes the way back."""
    # Without barriers XLA's GPU code returns wrong rows (jax 0.11.2, mesh 2 x 2 in one process, with a backward).
    given = jax.lax.optimization_barrier((x, jnp.zeros((rows, x.shape[1]), x.dtype), *there))
    moved = jax.lax.ragged_all_to_all(*given, axis_name=axis)
    arrived: jax.Array = jax.lax.optimization_barrier(moved)
    return arrived


def _move_fwd(
    x: jax.Array, there: _Way, back: _Way, rows: int, axis: str
) -> tuple[jax.Array, tuple[int, _Way, _Way]]:
    return _move(x, there, back, rows, axis), (x.shape[0], there, back)


def _move_bwd(
    rows: int, axis: str, residuals: tuple[int, _Way, _Way], dy: jax.Array
) -> tuple[jax.Array, None, None]:
    del rows
    received, there, back = residuals
    return _move(dy, back, there, received, axis), None, None


_move.defvjp(_move_fwd, _move_bwd)


class NativeMoEBlock(nn.Module):
    """`native_moe` as a Linen module with the parameters of `linen.MoEBlock`.

    Attributes:
      config: see MoEConfig.
      mesh: see `native_moe`.
      kernel_init: of the weights; see `init_params`.
    """

    config: MoEConfig
    mesh: Mesh | None = None
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> MoEOutput:
        MoEConfig.check("NativeMoEBlock", config=self.config)
        init = initializers(self.config, self.kernel_init)
        params = {
            name: self.param(name, init[name], shape, self.config.param_dtype)
            for name, shape in param_shapes(x.shape[-1], self.config).items()
        }
        return native_moe(params, x, self.config, self.mesh)

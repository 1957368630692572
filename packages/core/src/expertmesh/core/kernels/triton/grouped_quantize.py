"""Rows in groups to 8 bits, with a scale per group, and tokens with one scale, by the kernels of `quantize.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.quantize import Rows, choose_moved
from expertmesh.core.kernels.device import current_device
from expertmesh.core.kernels.triton import quantize
from expertmesh.core.kernels.triton.gather_rows import gather
from expertmesh.core.kernels.triton.quantize import (
    count_live,
    in_panels,
    magnitudes_of,
    store_along_rows,
)
from expertmesh.core.quantization.quantize_rows import Moved
from expertmesh.core.quantization.quantized import bits_of


def by_group_of(x, index, sizes, multiplier, **options):
    """`by_group`, of rows at an index, int32[1, C], or as they are."""
    options |= dict(clear_padding=index is None)
    if index is not None and multiplier is None:
        x, index = gather(x, index[..., None]), None
    return by_group(x, sizes, multiplier, index=index, **options)


# Programs that share tokens to find their amax, and elements of their tiles.
TOKEN_SPLITS, TOKEN_TILE = 1024, 8192


def quantize_tokens(x, row, group_sizes, *, format):
    """The leaves of what the reference of `quantization/quantize_moved.py` gives, for one participant."""
    (_, T, N), K = x.shape, row.shape[2]
    TN = launcher.divisor(N, 1024)
    amaxes = launcher.triton_call(
        x, row,
        kernel=_token_amax_kernel, out_type=jax.ShapeDtypeStruct((TOKEN_SPLITS,), jnp.int32), num_warps=8,
        grid=(TOKEN_SPLITS,),
        T=T, N=N, K=K, K_POW2=triton.next_power_of_2(K), TM=TOKEN_TILE // TN, TN=TN,
    )  # fmt: skip
    amaxes = _jax.match_varying((x, amaxes))[1]
    options = dict(amaxes=amaxes[None], copies=group_sizes.shape[1])
    data, scale = quantize.scaled(x, None, x.shape, format.dtype, **options)
    return data, scale[None]


@triton.jit
def _token_amax_kernel(
    x, row, amax,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """amax[i]: of tokens [T, N] that have a row, one of row [T, K] being no negative number, every so many tiles."""
    NUM_N: tl.constexpr = (N + TN - 1) // TN
    NUM_TILES: tl.constexpr = (T + TM - 1) // TM * NUM_N
    most = tl.zeros((TM,), tl.int32)
    place = tl.arange(0, K_POW2)[None, :]
    for tile in tl.range(tl.program_id(0), NUM_TILES, tl.num_programs(0)):
        token = tile // NUM_N * TM + tl.arange(0, TM)
        at = token.to(tl.int64)[:, None]
        inside = (token < T)[:, None]
        rows = tl.load(row + at * K + place, mask=inside & (place < K), other=-1)
        held = inside & (tl.max(rows, 1) >= 0)[:, None]
        columns = tile % NUM_N * TN + tl.arange(0, TN)[None, :]
        wide = tl.load(x + at * N + columns, mask=held & (columns < N), other=0).to(tl.float32)
        most = tl.maximum(most, tl.max(magnitudes_of(wide), 1))
    tl.store(amax + tl.program_id(0), tl.max(most, 0))


def along_rows(rows, group_sizes):
    """Quantized rows as the weight gradient reads them: if they are `Moved`, written so, in one pass."""
    if not isinstance(rows, Moved):
        return rows
    q, index = rows.base, rows.row_map.source_row
    (_, _, K), (_, C), sizes = q.shape, index.shape, group_sizes[0].astype(jnp.int32)
    config = choose_moved(Rows(C, K, jnp.dtype(q.dtype), 0, current_device()))
    tiles, G = config.tiles, sizes.shape[0]
    TN = tiles.columns if config.transposed else launcher.divisor(K, tiles.columns)
    TM, data = tiles.elements // TN, bits_of(q.data)
    shape = (K, C) if config.transposed else (1, C, K)
    out = launcher.triton_call(
        data, index, sizes,
        kernel=_move_kernel, out_type=jax.ShapeDtypeStruct(shape, data.dtype), num_warps=tiles.warps,
        grid=(triton.cdiv(C, TM) * triton.cdiv(K, TN),),
        M=C, N=K, G=G, G_POW2=triton.next_power_of_2(G), TM=TM, TN=TN,
        TRANSPOSED=config.transposed, **quantize.panel_of(data, index, K, TN),
    )  # fmt: skip
    out = out.T.reshape(1, C, K) if config.transposed else out
    return dataclasses.replace(q, data=jax.lax.bitcast_convert_type(out, q.data.dtype))


@triton.jit
def _move_kernel(
    data, index, sizes, out,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, PANEL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Rows of bytes [_, N] at the index [M], zeros where it is negative; [N, M] if TRANSPOSED.

    Tiles behind the last group are left as they are. The last rows come first: L2 has the others for the GEMM behind.
    """
    m, n = in_panels(tl.num_programs(0) - 1 - tl.program_id(0), M, N, TM, TN, PANEL)
    num_live = tl.minimum(count_live(sizes, G, G_POW2), M)
    if m >= num_live:
        return
    rows = m + tl.arange(0, TM)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    source = tl.load(index + rows, mask=rows < num_live, other=-1).to(tl.int64)
    codes = tl.load(data + source * N + columns, mask=inside & (source >= 0), other=0)
    at = rows.to(tl.int64) * N + columns
    store_along_rows(out, codes, at, inside, m, n, N, M, TRANSPOSED, "evict_first")


def by_group(
    x, sizes, multiplier, *, format, twice, amax_axes, index=None, parts=None, clear_padding=True
):
    """The leaves for a scale per group, of the rows of `x` [1, rows, ...], or with a multiplier of those at the index,
    int32[1, C].

    Args:
      sizes: int32[G].
      multiplier: float32[1, G], or None: of the amax.
      twice: whether a copy for the weight gradient is wanted.
      amax_axes: over which the amax is maximised.
      parts: int32[1, parts of a row, C], the amax of these, where what made the rows has found it.
      clear_padding: as of `quantize.by_tensor`.
    """
    C, ends = (x if index is None else index).shape[1], jnp.cumsum(sizes, dtype=jnp.int32)

    def found(parts):
        """The amax of each group, int32[1, G]."""
        amax = quantize.group_amax(parts[0], ends, by_part=by_part)[None]
        return jax.lax.pmax(amax, amax_axes) if amax_axes else amax

    shape, by_part = (1, C, x.size // x.shape[1]), parts is not None
    options = dict(ends=ends, index=index, twice=twice, clear_padding=clear_padding)
    data, scale, *more = quantize.by_tensor(
        x, multiplier, shape, found, format, parts=parts, **options
    )
    again = (more.pop(), scale) if twice else ()
    return data, scale, *again, *more

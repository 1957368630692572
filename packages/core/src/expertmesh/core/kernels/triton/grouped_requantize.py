"""Rows quantized along their features, quantized again along the rows, for NVIDIA GPUs: a byte is read for each number
and one is written. Bit for bit the kernels of `triton/quantize.py` one after the other. Rows of tokens are read at an
index.
"""

import triton
import triton.language as tl

from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice.quantize import Config
from expertmesh.core.kernels.formats import scaling
from expertmesh.core.kernels.triton.quantize import (
    TYPES,
    count_live,
    in_panels,
    panel_of,
    power_of_2,
    quantized_tile,
    rounded,
    store_along_rows,
    store_scale,
    without_subnormal,
)


@triton.jit
def _requantize_kernel(
    data, scale, index, sizes, out, out_scale,
    M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr,
    TN: tl.constexpr, PANEL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[M, N], as bytes, in blocks of 1 x BLOCK to blocks of BLOCK x 1, [N, M] if TRANSPOSED; between them in WIDE.

    Rows are those at the index [M], zeros where it is negative, unless it is None.
    """
    BLOCKS_N: tl.constexpr = (N + BLOCK - 1) // BLOCK
    m, n = in_panels(tl.program_id(0), M, N, BLOCK, TN, PANEL)
    rows = m + tl.arange(0, BLOCK)[:, None]
    columns = n + tl.arange(0, TN)[None, :]
    inside = rows < M
    if N % TN != 0:
        inside = inside & (columns < N)
    num_live = tl.minimum(count_live(sizes, G, G_POW2), M)
    at, held = rows.to(tl.int64) * N + columns, rows < num_live
    from_at, from_rows = at, rows.to(tl.int64)
    if index is not None:
        from_rows = tl.load(index + rows, mask=held, other=-1).to(tl.int64)
        held = from_rows >= 0
        from_at = from_rows * N + columns
    codes = tl.load(data + from_at, mask=inside & held, other=0)
    narrow = codes.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    PART: tl.constexpr = min(TN, BLOCK)  # of a block
    blocks = n // BLOCK + tl.arange(0, TN // PART)[None, :]
    factor = tl.load(
        scale + from_rows * BLOCKS_N + blocks, mask=held & (blocks < BLOCKS_N), other=0
    )
    if scale.dtype.element_ty == tl.uint8:
        factor = power_of_2(factor.to(tl.int32))
    product = narrow.reshape(BLOCK, TN // PART, PART) * factor[:, :, None]
    wide = rounded(without_subnormal(product), WIDE).reshape(BLOCK, TN).to(tl.float32)
    q, stored = quantized_tile(wide, BLOCK, 1, out.dtype.element_ty, SCALE, LARGEST, LIMIT, FLOOR)
    store_along_rows(out, q, at, inside, m, n, N, M, TRANSPOSED)
    store_scale(out_scale, stored, 0, m, 0, n, M, 1, N, BLOCK, 1)


def launch(data, scale, index, sizes, *, config: Config, format, dtype, out_type):
    """The results of types `out_type`; `dtype` is that between the two formats."""
    (_, C, K), BLOCK, G = data.shape, format.block[1], sizes.shape[0]
    TN = config.tiles.columns
    if index is not None:
        C = index.shape[1]
    panel = panel_of(data, index, K, TN)
    return launcher.triton_call(
        data, scale, index, sizes,
        kernel=_requantize_kernel, out_type=out_type, num_warps=config.tiles.warps,
        grid=(triton.cdiv(C, BLOCK) * triton.cdiv(K, TN),),
        M=C, N=K, G=G, G_POW2=triton.next_power_of_2(G), BLOCK=BLOCK, WIDE=TYPES[dtype.name], TN=TN,
        TRANSPOSED=config.transposed, **panel, **scaling(dtype, format),
    )  # fmt: skip

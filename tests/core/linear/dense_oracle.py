"""Float64 NumPy of the GEMMs of a layer, on what the library's quantization made of each operand."""

import numpy as np

from expertmesh.core import QuantizedArray, grouped_quantize, quantize


def values(q: QuantizedArray) -> np.ndarray:
    """What the data of `q` mean, float64: the scales of blocks by np.repeat, those of groups row by row."""
    out = np.asarray(q.data).astype(np.float64)
    if q.block:
        scale = np.asarray(q.scale).astype(np.float64)
        for dim, (size, length) in enumerate(zip(q.shape, q.block, strict=True)):
            scale = np.take(np.repeat(scale, length, axis=dim), np.arange(size), axis=dim)
        out = out * scale
    tensor = q.tensor_scale if q.block else q.scale
    if tensor is None:
        return out
    tensor = np.asarray(tensor).astype(np.float64)
    if q.group_sizes is None:
        return out * tensor.reshape(tensor.shape + (1,) * (out.ndim - tensor.ndim))
    for p, sizes in enumerate(np.asarray(q.group_sizes)):
        ends = np.cumsum(sizes)
        for g, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            out[p, end - size : end] *= tensor[p, g]
    return out


def dense_copies(x, weight, dy, recipe, keys):
    """Both operands of the forward, of the input gradient and of the weight gradient (requirements 3.1)."""
    f = recipe.formats()
    n, t = dy.ndim - 1, x.ndim - 2
    return (
        (quantize(x, f.x, axis=x.ndim - 1), quantize(weight, f.weight, axis=0, across=-1)),
        (
            quantize(dy, f.grad_dgrad, axis=n, key=keys[0]),
            quantize(weight, f.weight_dgrad, axis=-1, across=0),
        ),
        (
            quantize(x, f.x_wgrad, axis=t),
            quantize(dy, f.grad_wgrad, axis=t, key=keys[1]),
        ),
    )


def dense(copies, dy, bias):
    """y, dx, dkernel, dbias of [T, S, K] tokens."""
    (x, w), (dy_n, w_n), (x_t, dy_t) = (tuple(map(values, pair)) for pair in copies)
    return (
        np.einsum("tsk,kcn->tscn", x, w) + np.asarray(bias, np.float64),
        np.einsum("tscn,kcn->tsk", dy_n, w_n),
        np.einsum("tsk,tscn->kcn", x_t, dy_t),
        np.asarray(dy).astype(np.float64).sum((0, 1)),
    )


def grouped_copies(x, weight, sizes, dy, recipe, keys):
    """The same of rows in groups and of experts."""
    f = recipe.formats()
    return (
        (
            grouped_quantize(x, sizes, f.x, axis=2),
            quantize(weight, f.weight, axis=1, across=-1, batch_dims=1),
        ),
        (
            grouped_quantize(dy, sizes, f.grad_dgrad, axis=-1, key=keys[0]),
            quantize(weight, f.weight_dgrad, axis=-1, across=1, batch_dims=1),
        ),
        (
            grouped_quantize(x, sizes, f.x_wgrad, axis=1),
            grouped_quantize(dy, sizes, f.grad_wgrad, axis=1, key=keys[1]),
        ),
    )


def grouped(copies, sizes, dy, bias):
    """y, dx, dkernel, dbias, one product per participant and group."""
    (x, w), (dy_n, w_n), (x_t, dy_t) = (tuple(map(values, pair)) for pair in copies)
    dy, bias = np.asarray(dy).astype(np.float64), np.asarray(bias, np.float64)
    y, dx, dw, db = (np.zeros(a.shape) for a in (dy, x, w, bias))
    P, G = sizes.shape
    for p in range(P):
        first = 0
        for g, size in enumerate(sizes[p]):
            rows, first = slice(first, first + size), first + size
            e = p % (len(w) // G) * G + g
            y[p, rows] = np.tensordot(x[p, rows], w[e], 1) + bias[e]
            dx[p, rows] = np.tensordot(dy_n[p, rows], w_n[e], ((1, 2), (1, 2)))
            dw[e] += np.tensordot(x_t[p, rows], dy_t[p, rows], ((0,), (0,)))
            db[e] += dy[p, rows].sum(0)
    return y, dx, dw, db

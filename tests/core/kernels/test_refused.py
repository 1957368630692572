"""A kernel in CUDA C++ that does not compile, or that the GPU does not load: one in Triton takes its place."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from core.kernels.quantized_operands import KINDS, error_of, paired, quantized
from core.kernels.test_grouped_gemm import _kernels, _operands, _oracle
from expertmesh.core import dequantize, support
from expertmesh.core.kernels import device
from expertmesh.core.kernels.cuda import cuda_call
from expertmesh.core.kernels.device import Device, for_device
from expertmesh.core.linear.grouped_gemm import grouped_gemm_op, grouped_gemm_wgrad_op
from expertmesh.core.ops.activation import Activation
from expertmesh.core.quantization.activate_quantize import activate_quantize
from expertmesh.core.quantization.grouped_requantize import grouped_requantize
from expertmesh.core.quantization.recipe import Float8BlockScaling
from expertmesh.core.support import KernelError
from expertmesh.core.testing import relative_error

TAKES_ITS_PLACE = "planted; a kernel in Triton takes its place"


@pytest.fixture
def refused(monkeypatch):
    """A Hopper GPU on which no kernel in CUDA C++ compiles; what was asked for."""
    asked = []

    def refuse(source):
        asked.append(source)
        raise KernelError("planted")

    jax.clear_caches()
    support.warn_once.cache_clear()
    monkeypatch.setattr(cuda_call, "compile_cuda", refuse)
    monkeypatch.setattr(device, "current_device", Device)
    yield asked
    jax.clear_caches()


def of_kernel(given: list, failing: tuple[bool, ...], *, device: Device) -> str:
    given.append(device.runs_cuda)
    if device.runs_cuda in failing:
        raise KernelError("planted" if device.runs_cuda else "nor this one")
    return "cuda" if device.runs_cuda else "triton"


@pytest.mark.parametrize(
    "gpu, failing, tried, said",
    [
        (Device(), (), [True], ""),
        (Device(), (True,), [True, False], TAKES_ITS_PLACE),
        (Device(), (True, False), [True, False], "nor this one"),
        (Device(nvrtc=False), (False,), [False], "nor this one"),
        (Device(capability=80), (False,), [False], "nor this one"),
    ],
)
def test_what_is_tried_and_said(gpu, failing, tried, said, monkeypatch):
    support.warn_once.cache_clear()
    monkeypatch.setattr(device, "current_device", lambda: gpu)
    given: list = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            assert for_device(of_kernel)(given, failing) == ("triton" if failing else "cuda")
            words = "".join(str(w.message) for w in seen)
        except KernelError as error:
            assert not seen
            words = str(error)
    assert (given, words) == (tried, said)


@pytest.mark.gpu
@needs_triton
def test_grouped_gemms(refused):
    """By Triton's interpreter too."""
    operands, sizes = _operands(100, 72, 40, 4, 30, "float16")
    with pytest.warns(UserWarning, match=TAKES_ITS_PLACE) as seen:
        results = _kernels(*operands, sizes)
    assert len(refused) == 3 and len(seen) == 1
    for x, want in zip(results, _oracle(*operands, sizes), strict=True):
        assert relative_error(x, want) < 2e-5


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("kind", ["tensors", "blocks of 128"])
def test_grouped_gemms_of_8_bits(refused, kind):
    """By Triton's interpreter too."""
    C, K, N, G = 256, 160, 288, 2
    along, (dtype, _), error = KINDS[kind]
    rng = np.random.default_rng(0)
    sizes, block = np.array([[128, 128]], np.int32), (1, 1, along) if along else ()
    of_weight, of_rows = ((1, 128, 128), (1, 128, 1)) if along else ((), ())
    x, x_scale, x_wide = quantized(rng, (1, C, K), block, dtype, (1, G))
    w, w_scale, w_wide = quantized(rng, (G, K, N), of_weight, dtype, (G,))
    a, a_scale, a_wide = quantized(rng, (1, C, K), of_rows, dtype, (1, G))
    dy, dy_scale, dy_wide = quantized(rng, (1, C, N), of_rows, dtype, (1, G))
    to = dict(out_dtype=jnp.dtype("float32"), implementation="triton")
    given = [jnp.asarray(z) for z in (x, x_scale, w, w_scale, sizes)]
    of_wgrad = [jnp.asarray(z) for z in (a, a_scale, dy, dy_scale, sizes)]
    with pytest.warns(UserWarning, match=TAKES_ITS_PLACE) as seen:
        y = grouped_gemm_op(*paired(given, (block, of_weight)), clear_padding=True, **to)[0]
        dw = grouped_gemm_wgrad_op(*paired(of_wgrad, (of_rows, of_rows)), num_experts=G, **to)
    assert len(refused) == 2 and len(seen) == 1
    for g, rows in enumerate((slice(0, 128), slice(128, 256))):
        of_y = 1 if along else float(x_scale[0, g]) * float(w_scale[g])
        of_dw = 1 if along else float(a_scale[0, g]) * float(dy_scale[0, g])
        assert relative_error(y[rows], x_wide[0, rows] @ w_wide[g] * of_y) < error_of(kind, True)
        assert relative_error(dw[g], a_wide[0, rows].T @ dy_wide[0, rows] * of_dw) < error


@pytest.mark.gpu
@needs_triton
def test_quantizers(refused):
    h = jnp.asarray(np.random.default_rng(0).normal(size=(1, 256, 2, 128)), "bfloat16")
    sizes, format = jnp.asarray([[128, 128]], jnp.int32), Float8BlockScaling().formats().x
    with pytest.warns(UserWarning, match=TAKES_ITS_PLACE):
        copies = activate_quantize(h, sizes, (format, format), Activation())
        again = grouped_requantize(copies.along_features, sizes, format)
    assert len(refused) == 2
    gate, up = np.moveaxis(np.asarray(h, np.float64), 2, 0)
    want = gate / (1 + np.exp(-gate)) * up
    for copy in (copies[0], copies[1], again):
        assert relative_error(dequantize(copy), want) < 5e-2

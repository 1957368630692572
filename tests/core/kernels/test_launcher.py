"""What a launch hands to XLA, and what comes of it on a GPU."""

import base64
import re
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.marks import needs_triton
from expertmesh.core import _jax, _native, is_supported, support
from expertmesh.core.kernels import launcher
from expertmesh.core.op import Kernel, Op
from expertmesh.core.support import KernelError

HOST = _native.host()
needs_host = pytest.mark.skipif(isinstance(HOST, str), reason=str(HOST))


def packed(code: bytes, level: int) -> str:
    packer = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return base64.b64encode(packer.compress(code) + packer.flush()).decode()


def codes():
    rng = np.random.default_rng(0)
    yield b""
    for size in (1, 300, 70_000):
        yield rng.integers(0, 256, size, dtype=np.uint8).tobytes()  # of stored blocks
        yield bytes(size)  # of far repetitions
        yield np.cumsum(rng.integers(0, 2, size)).astype(np.uint8).tobytes()
        yield rng.geometric(0.2, size).astype(np.uint8).tobytes()  # of codes of many lengths


@needs_host
@pytest.mark.parametrize("level", [0, 1, 9])
def test_machine_code_comes_back(level):
    for code in codes():
        assert HOST.unpack(packed(code, level)) == code
    binary = launcher.Binary("k", bytes(range(256)) * 40, 32, 0)
    assert HOST.unpack(binary.image) == binary.code


@needs_host
@pytest.mark.parametrize("image", ["", "!", "AAAA", "/w==", packed(bytes(9000), 9)[:-6]])
def test_a_damaged_image_is_an_error(image):
    with pytest.raises(RuntimeError, match="the image"):
        HOST.unpack(image)


@needs_host
def test_kernels_differ_by_all_that_loading_depends_on():
    of = launcher.Binary("k", b"code", 32, 1024)
    others = [("j", b"code", 32, 1024), ("k", b"other", 32, 1024), ("k", b"code", 32, 1025)]
    digests = {of.digest, *(launcher.Binary(*other).digest for other in others)}
    assert len(digests) == 4


@needs_host
def test_a_program_carries_the_launch():
    """Names, numbers of buffers, strides in bytes, bits of scalars."""
    binary = launcher.Binary("kernel", b"machine code", 96, 4096, cluster=(2, 1, 1))
    x = jax.ShapeDtypeStruct((6, 128), jnp.bfloat16)
    out, count = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def call(x, y):
        windows = launcher.TensorMap(y, y.dtype, (3, 4, 128), (128, 128, 1), (1, 4, 64))
        parameters = (
            x, None, windows, np.int32(-2), np.int64(-3), np.float32(1.5),
            launcher.Result(0), launcher.TensorMap.of(out, (2, 8), base=launcher.Result(0)),
            launcher.Result(1, zeroed=True),
        )  # fmt: skip
        return launcher.launch(binary, *parameters, out_type=(out, count), grid=(5, 7))

    text = jax.jit(call).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    (shape,) = re.findall(r"shape = array<i64: ([^>]*)>|shape = dense<\[([^\]]*)\]>", text)
    assert [int(n) for n in "".join(shape).split(",")] == [5, 7, 1, 2, 1, 1, 96, 4096]
    (found,) = re.findall(r"parameters = (?:array<i64: ([^>]*)>|dense<\[([^\]]*)\]>)", text)
    bits = int(np.float32(1.5).view(np.int32))
    assert [int(n) for n in "".join(found).split(",")] == [
        *(1, 0), 0,
        *(4, 1, 9, 3, 3), *(3, 4, 128), *(256, 256), *(1, 4, 64),
        *(2, -2), *(3, -3), *(2, bits),
        *(1, 2),
        *(4, 2, 7, 0, 2), *(4, 8), 32, *(2, 8),
        *(5, 3),
    ]  # fmt: skip
    (image,) = re.findall(r'image = "([^"]*)"', text)
    assert HOST.unpack(image) == b"machine code"


@needs_host
def test_code_that_a_gpu_refuses_is_an_error_of_the_launch():
    if _jax.local_gpu() is None:
        problem = HOST.load(0, "kernel", "digest", 0, b"no machine code")
        assert problem
        return
    binary = launcher.Binary("kernel", b"no machine code", 32, 0)
    with pytest.raises(KernelError, match="does not load the kernel kernel"):
        launcher.launch(binary, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), grid=(1,))


def broken(x):
    raise KernelError("triton 9.9 does not compile it")


def planted(monkeypatch, launch=broken) -> Op:
    """An op whose kernel this machine's platform takes."""
    support.warn_once.cache_clear()
    kernel = Kernel("broken", jax.default_backend().replace("gpu", "cuda"), launch)
    return Op("planted", lambda x: x + 1, "a -> a", kernels=(kernel,))


def test_auto_takes_the_reference_where_a_kernel_does_not_compile(monkeypatch):
    op, x = planted(monkeypatch), jnp.arange(3.0)
    with pytest.warns(UserWarning) as seen:
        for function in (op, jax.jit(op), jax.jit(lambda x: op(2 * x))):
            function(x)
        np.testing.assert_array_equal(op(x), [1, 2, 3])
    (message,) = {str(w.message) for w in seen}
    assert len(seen) == 1, "once"
    for part in (
        "planted: using the reference",
        "triton 9.9",
        "`pip install 'expertmesh-core[cuda13]'`",
    ):
        assert part in message


def test_by_name_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    op = planted(monkeypatch)
    with pytest.raises(
        KernelError, match="planted: implementation='broken' cannot run: triton 9.9"
    ) as found:
        op(jnp.arange(3.0), implementation="broken")
    assert "use implementation='auto'" in str(found.value)


def test_other_errors_of_a_kernel_are_not_hidden(monkeypatch):
    def wrong(x):
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake of ours"):
        planted(monkeypatch, wrong)(jnp.arange(3.0))


def test_a_kernel_file_that_cannot_be_imported_is_a_kernel_that_cannot_run(monkeypatch):
    from expertmesh.core.op import _Imported

    with pytest.raises(KernelError, match="cannot be imported"):
        _Imported("expertmesh.core.kernels.no_such_file", "launch")(1)


@needs_triton
def test_triton_that_cannot_compile_says_what_and_which(monkeypatch):
    def fail(*_):
        raise AttributeError("module 'triton.language' has no attribute 'gone'")

    kernel = type("of_an_op", (), {"arg_names": ["x", "out"]})
    monkeypatch.setattr(_jax, "compile_triton", fail)
    monkeypatch.setattr(_native, "host", lambda: object())
    with pytest.raises(KernelError, match=r"triton \d+\.\d+.* does not compile of_an_op .*'gone'"):
        launcher.triton_call(
            jnp.ones(3), kernel=kernel, out_type=jax.ShapeDtypeStruct((3,), jnp.float32), grid=(1,)
        )


def test_without_the_extension_jax_triton_launches_and_it_is_said_once(monkeypatch):
    support.warn_once.cache_clear()
    calls = []
    monkeypatch.setattr(_native, "host", lambda: "the extension _host is not built")
    monkeypatch.setattr(_jax, "jax_triton_call", lambda *x, **options: calls.append(options))
    with pytest.warns(UserWarning, match="_host is not built.*jax-triton launches") as seen:
        for _ in range(2):
            launcher.triton_call(kernel=None, out_type=(), grid=(1,), num_warps=8, SIZE=4)
    assert len(seen) == 1
    assert [(c["num_warps"], c["SIZE"], c["compute_capability"]) for c in calls] == [
        (8, 4, launcher.capability())
    ] * 2


def test_without_any_launcher_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(_native, "host", lambda: "the extension _host is not built")
    monkeypatch.setattr(_jax, "has_jax_triton", lambda: False)
    kernel = Kernel.triton("expertmesh.core.kernels.triton.activation", "launch", lambda *_: None)
    monkeypatch.setattr(
        "expertmesh.core.support.distribution_unsupported", lambda requirement: None
    )
    assert "not built" in kernel.unsupported_here()
    monkeypatch.setattr(_jax, "has_jax_triton", lambda: True)
    assert kernel.unsupported_here() is None


@pytest.mark.gpu
@needs_triton
@needs_host
class TestOnAGpu:
    """A kernel in Triton and one in CUDA C++, through everything that JAX does to a program."""

    @staticmethod
    def double(x):
        """x + x by a kernel that reads through TMA's descriptor of NumPy's scalars and of pointers."""
        from expertmesh.core.kernels.cuda.cuda_call import cuda_call

        source = (
            'extern "C" __global__ void twice(const float* x, int size, float* out) {\n'
            "  extern __shared__ float staged[];\n"
            "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
            "  if (i < size) { staged[threadIdx.x] = x[i]; out[i] = 2 * staged[threadIdx.x]; }\n}\n"
        )
        return cuda_call(
            x, source=source, name="twice", scalars=(x.size,), out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            programs=-(-x.size // 128), warps=4, shared=100 * 1024,
        )  # fmt: skip

    def test_loops_remat_and_donation(self):
        def body(x, _):
            return jax.checkpoint(self.double)(x) / 2 + 1, x[0]

        run = jax.jit(lambda x: jax.lax.scan(body, x, length=50), donate_argnums=0)
        for start in range(3):  # the buffers move
            y, firsts = run(jnp.full(1000, float(start)))
            np.testing.assert_array_equal(y, np.full(1000, start + 50.0))
            np.testing.assert_array_equal(firsts, start + np.arange(50.0))

    def test_a_count_begins_with_zero_at_each_launch(self):
        from expertmesh.core.kernels.cuda.cuda_call import cuda_call

        source = (
            'extern "C" __global__ void count(const float* x, int more, float* out, int* counted) {\n'
            "  const int before = atomicAdd(counted, more);\n"
            "  if (before == 31 * more) out[0] = x[0] + before;\n}\n"
        )
        out_type = jax.ShapeDtypeStruct((1,), jnp.float32)

        def body(x, _):
            x = cuda_call(
                x, source=source, name="count", scalars=(2,), out_type=out_type, programs=1, warps=1,
                shared=0, queue=True,
            )  # fmt: skip
            return x, x[0]

        run = jax.jit(lambda x: jax.lax.scan(body, x, length=50))
        for start in (0.0, 5.0):
            _, counts = run(jnp.full(1, start))
            np.testing.assert_array_equal(counts, start + 62.0 * np.arange(1, 51))

    def test_every_local_device(self):
        for device in jax.local_devices():
            x = jax.device_put(jnp.arange(1000.0), device)
            y = jax.jit(self.double)(x)
            assert y.devices() == {device}
            np.testing.assert_array_equal(y, 2 * np.arange(1000.0))

    def test_a_program_that_was_kept_loads_by_itself(self):
        from jax.experimental import serialize_executable

        x = jnp.arange(1000.0)
        compiled = jax.jit(self.double).lower(x).compile()
        loaded = serialize_executable.deserialize_and_load(
            *serialize_executable.serialize(compiled)
        )
        np.testing.assert_array_equal(loaded(x), 2 * np.arange(1000.0))

    def test_it_is_supported(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert is_supported("triton") == (True, "")

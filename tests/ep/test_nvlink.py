"""The transport "nvlink": what it refuses, what it asks XLA for, and on GPUs the exchanges of the other transports."""

import dataclasses
import pathlib
import shutil
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_case import Case, operands_of, run_case
from ep.exchange_oracle import routing
from expertmesh.core import TensorFormat, quantize
from expertmesh.ep import (
    EpConfig,
    _native,
    combine,
    dispatch,
    is_supported,
    prepare,
    raise_stall,
    transports,
)
from expertmesh.ep.transports import cheapest, nvlink

CASE = Case(transport="nvlink")
FP8 = TensorFormat(dtype="float8_e4m3fn", block=(1, 128), scale="float32")


@pytest.fixture
def on_cuda(monkeypatch):
    """Programs are traced as if these devices were GPUs."""
    monkeypatch.setattr(transports, "platform_of", lambda *operands: "cuda")


def lowered(case, names=("ep",), sizes=(8,), axis="ep"):
    """A dispatch and a combine for CUDA, in StableHLO."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
    sharding = NamedSharding(mesh, PartitionSpec(names))

    def run(topk, tokens):
        handle = prepare(topk, dataclasses.replace(case.config, axis=axis))
        return combine(handle, dispatch(handle, tokens))

    operands = (
        jax.ShapeDtypeStruct((48, case.K), jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct((48, case.D), jnp.bfloat16, sharding=sharding),
    )
    return jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_names_the_groups_by_places_in_the_mesh(on_cuda):
    text = lowered(CASE, ("a", "b", "c"), (2, 2, 2), ("c", "a"))
    assert text.count("@expertmesh_ep_nvlink_dispatch") == 1
    assert text.count("@expertmesh_ep_nvlink_combine") == 1
    # Two groups, b = 0 and b = 1; in each a varies fastest.
    assert "groups = dense<[0, 4, 1, 5, 2, 6, 3, 7]>" in text
    assert "size = 4 : i64" in text


def test_staging_rows_are_what_travels(on_cuda):
    text = lowered(dataclasses.replace(CASE, D=24, K=3))
    assert (
        "stride = 48 : i64" in text and "stride = 96 : i64" in text
    )  # bfloat16 there, float32 back
    text = lowered(dataclasses.replace(CASE, D=24, K=1))
    assert "stride = 48 : i64" in text and "stride = 96 : i64" not in text


def test_cpu_says_so_when_traced():
    with pytest.raises(ValueError) as error:
        lowered(CASE)
    for words in ("'nvlink'", "ep_size=8", "NVIDIA GPUs", "platform is cpu", "transport='auto'"):
        assert words in str(error.value)


def test_more_choices_than_a_warp_has_lanes(on_cuda):
    with pytest.raises(ValueError, match="32 choices per token at most; got ep_size=8, K=33"):
        lowered(dataclasses.replace(CASE, K=33))


def test_one_rank_needs_no_kernel():
    topk, x = jnp.asarray([[0, 2], [1, 1]], jnp.int32), jnp.asarray([[1.0], [10.0]])
    handle = prepare(topk, EpConfig(num_experts=3, transport="nvlink"))
    np.testing.assert_array_equal(dispatch(handle, x)[0, :, 0], [1, 10, 10, 1])


def test_is_supported():
    supported, reason = is_supported("nvlink", jax.devices("cpu")[0])
    assert not supported and "NVIDIA GPUs" in reason


def test_auto_never_takes_it():
    assert cheapest(64, 8, 64, 8, 2) in ("ring", "all_to_all")


GPU = Case(mesh=(("ep", 2),), sizes=(80,), E=8, K=3, transport="nvlink")
GPU_CASES = {
    "float32": (GPU, "manual", "float32"),
    "bfloat16, rows of 12 bytes": (GPU, "explicit", "bfloat16"),
    "rows of 16-byte words": (dataclasses.replace(GPU, D=512, A=4), "explicit", "bfloat16"),
    "odd rows": (dataclasses.replace(GPU, D=7), "explicit", "bfloat16"),
    "little room": (dataclasses.replace(GPU, C=48, D=512), "explicit", "bfloat16"),
    "one choice": (dataclasses.replace(GPU, K=1, D=64), "manual", "float32"),
}


def need_gpus(num):
    if len(jax.devices("cuda")) < num:
        pytest.skip(f"needs {num} GPUs in one process")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_equals_the_oracle(name):
    need_gpus(2)
    case, mode, dtype = GPU_CASES[name]
    run_case(case, mode, dtype, kinds=("uniform", "skewed", "one", "none", "holes"))


@pytest.mark.gpu
def test_over_all_gpus():
    num = len(jax.devices("cuda"))
    need_gpus(2)
    case = Case(mesh=(("ep", num),), sizes=(40 * num,), E=2 * num, A=4, transport="nvlink")
    run_case(case, "explicit", "bfloat16", kinds=("uniform", "skewed", "one", "none", "holes"))


def delayed(x, i, mesh):
    """x; each rank comes late now and then."""

    def wait(x, i):
        turn = i + jax.lax.axis_index("ep")
        steps = jnp.where(turn % 4 == 0, turn * 7 % 31, 0)
        a = jnp.full((128, 128), 1e-3) + x[0, 0].astype(jnp.float32)
        a = jax.lax.fori_loop(0, steps, lambda _, a: jnp.tanh(a @ a), a)
        return x + jnp.minimum(jnp.abs(a[0, 0]), 0).astype(x.dtype)

    each = jax.P(mesh.axis_names)
    on_shards = jax.shard_map(wait, in_specs=(each, jax.P()), out_specs=each, check_vma=False)
    return on_shards(x, i)


def differences(mesh, steps=1, tokens=256, features=1024):
    """Exchanges by "nvlink" against "all_to_all", compared on the devices: wrong elements, and the largest error."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    num, top_k = tokens * mesh.size, 4

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    rng = np.random.default_rng(0)
    topk = put(routing("skewed", num, top_k, 8 * mesh.size))
    x = put(np.asarray(rng.normal(size=(num, features)), jnp.bfloat16))

    def step(carry, i):
        topk, x = carry
        x = delayed(x, i, mesh)
        topk = jnp.where((topk + i) % 7 == 0, -1, (topk + i) % (8 * mesh.size))
        handle = prepare(topk, EpConfig(num_experts=8 * mesh.size, axis="ep"))
        rows, want = (dispatch(handle, x, transport=t) for t in ("nvlink", "all_to_all"))
        out, like = (combine(handle, want, transport=t) for t in ("nvlink", "all_to_all"))
        again = combine(handle, want, transport="nvlink")
        error = jnp.max(jnp.abs(out.astype(jnp.float32) - like.astype(jnp.float32)))
        wrong = jnp.sum(rows != want) + jnp.sum(out != again)
        return (topk, (out / (1 + jnp.max(jnp.abs(out)))).astype(x.dtype)), (wrong, error)

    def run(topk, x):
        _, (wrong, error) = jax.lax.scan(step, (topk, x), jnp.arange(steps))
        return jnp.sum(wrong), jnp.max(error)

    with jax.set_mesh(mesh):
        wrong, error = jax.jit(run)(topk, x)
    return [int(wrong), float(error)]


def explicit_mesh(sizes, names=("ep",)):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


@pytest.mark.gpu
def test_many_steps_in_a_scan():
    need_gpus(2)
    wrong, error = differences(explicit_mesh((2,)), steps=10_000, tokens=64, features=264)
    assert wrong == 0 and error < 0.1


def check_processes():
    mesh = explicit_mesh((jax.device_count(),))
    return differences(mesh, steps=20)


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_one_gpu_per_process(multiprocess):
    first, second = multiprocess("ep.test_nvlink:check_processes", processes=2, devices=1)
    assert first == second
    assert first[0] == 0 and first[1] < 0.1


@pytest.mark.gpu
def test_quantized_rows_travel_with_their_scales():
    need_gpus(2)
    mesh = explicit_mesh((2,))
    with jax.set_mesh(mesh):
        place = partial(jax.sharding.reshard, out_shardings=jax.P("ep"))
        handle = prepare(
            place(jnp.asarray(routing("holes", 80, 3, 8))), EpConfig(num_experts=8, axis="ep")
        )
        x = place(jax.random.normal(jax.random.key(0), (80, 256)))
        q = quantize(x, FP8)
        got, want = (dispatch(handle, q, transport=t) for t in ("nvlink", "all_to_all"))
    for part in ("data", "scale"):
        a, b = (np.asarray(getattr(y, part)).astype(np.float32) for y in (got, want))
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["bfloat16", "float16", FP8])
def test_sums_are_rounded_on_the_way(wire):
    need_gpus(2)
    mesh = explicit_mesh((2,))
    with jax.set_mesh(mesh):
        place = partial(jax.sharding.reshard, out_shardings=jax.P("ep"))
        handle = prepare(
            place(jnp.asarray(routing("holes", 80, 3, 8))), EpConfig(num_experts=8, axis="ep")
        )
        rows = place(jax.random.normal(jax.random.key(0), (*handle.source.shape, 256)))
        got, want = (
            combine(handle, rows, transport=t, wire_format=wire) for t in ("nvlink", "all_to_all")
        )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_layers_of_other_sizes_share_a_window():
    need_gpus(2)
    small = dataclasses.replace(GPU, sizes=(16,), D=8)
    large = dataclasses.replace(GPU, sizes=(640,), D=512)
    for case in (small, large, small):
        run_case(case, "explicit", "float32", kinds=("holes",))


@pytest.mark.gpu
def test_under_checkpoint_and_scan_over_layers():
    need_gpus(2)
    case = dataclasses.replace(GPU, D=32)
    topk = routing("holes", 80, case.K, case.E)
    operands = operands_of(case, case.oracle(topk), topk, "float32")
    mesh = explicit_mesh((2,))

    def loss(tokens, topk, transport):
        config = dataclasses.replace(case.config, transport=transport)

        @jax.checkpoint
        def layer(x, _):
            handle = prepare(topk, config)
            return combine(handle, jnp.sin(dispatch(handle, x))), None

        out, _ = jax.lax.scan(layer, tokens, None, length=3)
        return jnp.sum(out**2)

    with jax.set_mesh(mesh):
        place = partial(jax.sharding.reshard, out_shardings=jax.P("ep"))
        args = place(jnp.asarray(operands[1] / 512)), place(jnp.asarray(topk))
        grads = [
            jax.jit(jax.grad(partial(loss, transport=t)))(*args) for t in ("nvlink", "all_to_all")
        ]
    np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_ranks_follow_the_mesh_and_models_alternate():
    need_gpus(2)
    devices = np.array(jax.devices("cuda")[:2])
    meshes = [
        jax.sharding.Mesh(order, ("ep",), axis_types=(AxisType.Explicit,))
        for order in (devices, devices[::-1])
    ]
    for features in (128, 1024):
        for mesh in meshes:
            wrong, error = differences(mesh, steps=3, tokens=32, features=features)
            assert wrong == 0 and error < 0.1


@pytest.mark.gpu
def test_a_late_rank_is_named_and_the_next_call_works(monkeypatch):
    need_gpus(2)
    monkeypatch.setattr(nvlink, "TIMEOUT_MS", 300)
    num, features = 23, 72  # of no other test: the time is compiled in
    topk = np.stack([np.arange(2 * num) % 8, (np.arange(2 * num) + 4) % 8], axis=1).astype(np.int32)

    mesh, each = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,)), jax.P("ep")
    config = EpConfig(num_experts=8, axis="ep", transport="nvlink")
    on_shards = partial(jax.shard_map, mesh=mesh, out_specs=each, check_vma=False)
    # Apart from the step: XLA's own collective would wait for the late rank.
    handle = on_shards(partial(prepare, config=config), in_specs=each)(topk)
    source = np.asarray(handle.source)

    def step(handle, x, delay):
        """Rank 1 comes after `delay` multiplications."""
        late = jnp.where(jax.lax.axis_index("ep") == 1, delay, 0)
        a = jnp.full((1024, 1024), 1e-3) + x[0, 0]
        a = jax.lax.fori_loop(0, late, lambda _, a: jnp.tanh(a @ a), a)
        return dispatch(handle, x + jnp.minimum(jnp.abs(a[0, 0]), 0))

    run = partial(jax.jit(on_shards(step, in_specs=(each, each, jax.P()))), handle)
    x = np.ones((2 * num, features), np.float32)
    rows = np.asarray(run(x, 0))
    raise_stall()
    np.testing.assert_array_equal(rows, np.where(source >= 0, 1, 0)[..., None] * np.ones(features))
    late_rows = np.asarray(run(x, 20_000))
    from_late_rank = source[0] >= num * 2
    assert np.isnan(late_rows[0][from_late_rank]).all()
    np.testing.assert_array_equal(late_rows[0][~from_late_rank], rows[0][~from_late_rank])
    with pytest.raises(RuntimeError, match="rank 0 .* in vain for rank 1 to send its rows"):
        raise_stall()
    np.testing.assert_array_equal(run(x, 0), rows)
    raise_stall()


@pytest.mark.gpu
def test_the_memory_in_use_is_known():
    need_gpus(2)
    differences(explicit_mesh((2,)), tokens=64, features=264)
    assert _native.window_bytes() >= 2 * 2 * 2 * 64 * 264 * 4  # ranks, halves, tokens, float32


@pytest.mark.gpu
@pytest.mark.parametrize("checker", [(), ("compute-sanitizer", "--error-exitcode=3")])
def test_kernels_alone_touch_only_their_memory(checker, tmp_path):
    tools = _native.find_tools()
    if isinstance(tools, str) or checker and not shutil.which(checker[0]):
        pytest.skip("needs nvcc and compute-sanitizer")
    capability = float(jax.devices("cuda")[0].compute_capability)
    flags = ["-std=c++17", f"-arch={_native.architecture(capability)}", f"-I{_native.SOURCES}"]
    sources = [pathlib.Path(__file__).with_name("nvlink_alone.cu"), _native.SOURCES / "exchange.cu"]
    program = tmp_path / "alone"
    subprocess.run([tools.nvcc, *flags, *sources, "-o", program], check=True)
    run = subprocess.run([*checker, program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]
    assert "ok" in run.stdout

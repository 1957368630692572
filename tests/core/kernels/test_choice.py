"""Which kernel runs, with which tiles: what was measured is chosen, everything chosen fits, and all can be chosen."""

import dataclasses
import itertools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from core.kernels.quantized_operands import E4M3
from expertmesh.core import _jax
from expertmesh.core.kernels import launcher
from expertmesh.core.kernels.choice import grouped_gemm as plain
from expertmesh.core.kernels.choice import quantize
from expertmesh.core.kernels.choice import quantized_grouped_gemm as quantized
from expertmesh.core.kernels.cuda import (
    activate_quantize,
    grouped_requantize,
    quantize_both,
    quantize_square,
)
from expertmesh.core.kernels.device import MIN_STEPS, Device, current_device
from expertmesh.core.linear import pair
from expertmesh.core.ops.activation import Activation
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks/results"
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
H100, H200, B200 = Device(), Device(), Device(capability=100, multiprocessors=148)
NO_NVRTC = Device(nvrtc=False)
OTHERS = Device(capability=80, multiprocessors=108), Device(capability=120, multiprocessors=188)
AMONG = Device(alone=False)
DEVICES = H100, B200, NO_NVRTC, AMONG, *OTHERS
OUTPUTS = BF16, F32, jnp.dtype("float16")
REGISTERS = 65536  # of a multiprocessor


def rows(num_rows, contraction, width, groups=8, device=H100, out=BF16):
    return plain.Rows(num_rows, contraction, width, groups, BF16, out, device)


def quantized_rows(along, groups=8, device=H100, out=BF16, sizes=(4096, 2048, 1536)):
    dtype = jnp.dtype(E4M3)
    return quantized.Rows(*sizes, groups, dtype, out, device, along)


def quantized_weights(along, groups=8, device=H100, out=BF16, sizes=(4096, (2048, 1536))):
    return quantized.Weights(*sizes, groups, out, device, along)


def measured(bench):
    """(case, rows, contraction of the forward, its width, groups), of each measurement of one shape."""
    cases = [row["case"] for row in json.loads((RESULTS / f"{bench}.json").read_text())]
    found = [(case, re.search(r"(\d+)x(\d+)x(\d+).*, (\d+) groups", case)) for case in cases]
    return [(case, *map(int, match.groups())) for case, match in found if match]


def test_results_beyond_the_offsets_of_the_kernel_in_cuda():
    """Its offsets count 8 elements, in 32 bits."""
    assert plain.choose_rows(rows(2**20, 512, 2**15 - 8)).kernel == "cuda"
    assert plain.choose_rows(rows(2**20, 512, 2**15)).kernel == "triton"


def test_many_large_groups_leave_each_warp_a_strip_of_its_own():
    def tiles(groups):
        return plain.choose_weights(plain.Weights(2**17, (256, 128), groups, BF16, H100)).tiles

    few, many = tiles(64), tiles(65)
    assert (few.stages, few.strips) == (4, 0)
    assert (many.stages, many.strips) == (4, 1)


def test_more_rows_than_the_kernel_of_weight_gradients_counts():
    """A tile's rows have 29 bits of a word."""
    few = plain.Weights(2**29 - 1, (8, 8), 4, BF16, H100)
    assert plain.choose_weights(few).kernel == "cuda"
    more = dataclasses.replace(few, rows=2**29)
    assert plain.choose_weights(more).kernel == "triton"


@pytest.mark.parametrize("case, num_rows, K, N, groups", measured("grouped_gemm"))
def test_measured_grouped_gemms(case, num_rows, K, N, groups):
    """Triton's kernel where the contraction is long, else the one in CUDA C++, as docs/dev/kernels.md says."""
    if "wgrad" in case:
        config = plain.choose_weights(plain.Weights(num_rows, (K, N), groups, BF16, H200))
        assert (config.kernel, config.tiles) == ("cuda", plain.WEIGHTS_HOPPER)
        return
    contraction, width = (N, K) if "dgrad" in case else (K, N)
    config = plain.choose_rows(rows(num_rows, contraction, width, groups, H200))
    long = {"bfloat16 dgrad mixtral w13", "bfloat16 dgrad tutorial w13"}
    triton = any(case.startswith(name) for name in long)
    tiles = plain.ROWS if triton else plain.ROWS_HOPPER
    assert (config.kernel, config.tiles) == ("triton" if triton else "cuda", tiles)


def test_measured_weight_gradients_of_small_groups():
    cases = [row["case"] for row in json.loads((RESULTS / "uneven_groups.json").read_text())]
    assert any(case.startswith("bfloat16 wgrad 32768x2048x7168, 256 groups of") for case in cases)

    def tiles(groups, out=BF16):
        return plain.choose_weights(plain.Weights(32768, (2048, 7168), groups, out, H200)).tiles

    assert tiles(256) == plain.WEIGHTS_HOPPER_SMALL.fit(256, BF16)
    assert tiles(128) == plain.WEIGHTS_HOPPER_MANY.fit(128, BF16)
    assert tiles(64) == plain.WEIGHTS_HOPPER
    assert tiles(256, F32) == plain.WEIGHTS_HOPPER_WIDE.fit(256, F32)


@pytest.mark.parametrize("case, num_rows, K, N, groups", measured("gathered_gemm"))
def test_measured_gathered_gemms(case, num_rows, K, N, groups):
    config = plain.choose_gathered(rows(num_rows, K, N, groups, H200))
    assert (config.kernel, config.tiles) == ("triton", plain.GATHERED)


@pytest.mark.parametrize("case, num_rows, K, N, groups", measured("quantized_grouped_gemm"))
def test_measured_quantized_grouped_gemms(case, num_rows, K, N, groups):
    if "wgrad" in case:
        gemm = quantized_weights(128, groups, H200, sizes=(num_rows, (K, N)))
        config, tiles = quantized.choose_weights(gemm), quantized.WEIGHTS_BLOCKS
    else:
        gemm = quantized_rows(128, groups, H200, sizes=(num_rows, K, N))
        config, tiles = quantized.choose_rows(gemm), quantized.ROWS_BLOCKS
    assert (config.kernel, config.tiles) == ("split", tiles)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("block, kernel", [(128, "cuda"), (32, "triton")])
def test_measured_quantizers(gradient, block, kernel):
    """Of 32768 rows, as in benchmarks/results; only copies that are transposed are faster in CUDA C++."""
    activated = quantize.Activated(32768, 4096, BF16, block, H200, BF16 if gradient else None)
    assert quantize.choose_activation(activated).kernel == "cuda"
    requantized = quantize.Rows(32768, 7168, BF16, block, H200)
    assert quantize.choose_requantize(requantized).kernel == kernel
    of_eights = quantize.Rows(32768, 264, BF16, block, H200)
    assert quantize.choose_requantize(of_eights).kernel == "triton"


def test_rows_in_cuda_are_for_hopper_and_short_contractions():
    def kernel(*sizes, **more):
        return plain.choose_rows(rows(*sizes, **more)).kernel

    short = 16384, 4096, 4096
    assert kernel(*short) == kernel(128, 4096, 4096) == kernel(16384, 14336, 4096) == "cuda"
    assert kernel(8192, 8191, 1024) == kernel(16384, 20479, 4096) == "cuda"
    assert kernel(8192, 8192, 1024) == kernel(16384, 20480, 4096) == "triton"
    assert kernel(*short, groups=1024) == "cuda" and kernel(*short, groups=1025) == "triton"
    assert kernel(*short, device=B200) == kernel(*short, device=NO_NVRTC) == "triton"
    small, large = (plain.choose_rows(rows(n, 4096, 4096)).tiles for n in (1024, 1025))
    assert (small, large) == (plain.SMALL_GROUPS_HOPPER, plain.ROWS_HOPPER)
    # Eight rows are at most eight tiles of rows, and 132 multiprocessors 66 clusters.
    queued = [plain.choose_rows(rows(8, 4096, N)).tiles.waves for N in (4096, 4097)]
    assert queued == [0, 1]
    # Among other devices a cluster that begins late leaves the others more.
    among = [plain.choose_rows(rows(*short, device=device)) for device in (H100, AMONG)]
    assert [each.tiles.waves for each in among] == [0, 1]
    assert {each.programs for each in among} == {132}


def test_weight_gradients_in_cuda_are_for_hopper_and_what_its_windows_hold():
    def kernel(num_rows, groups, out=BF16, device=H100):
        gemm = plain.Weights(num_rows, (256, 128), groups, out, device)
        return plain.choose_weights(gemm).kernel

    assert kernel(64, 8) == kernel(4096, 4096) == kernel(4096, 1024, F32) == "cuda"
    assert kernel(63, 8) == kernel(4096, 8192) == kernel(4096, 2048, F32) == "triton"
    assert kernel(64, 8, device=B200) == kernel(64, 8, device=NO_NVRTC) == "triton"


def test_weight_gradients_among_other_devices_let_a_collective_begin():
    def chosen(width, device=AMONG, **options):
        gemm = plain.Weights(32768, (2048, width), 8, BF16, device)
        config = plain.choose_weights(gemm, **options)
        return config.tiles.waves, config.programs

    # Four shares and a wave for the rest, if each has 120 steps of 128 x 256 x 64; or one wave.
    assert chosen(8192) == (5, 660)
    assert chosen(256) == (1, 132)
    assert chosen(8192, H100) == (0, 132)
    # No warp is left that would fill a queue.
    assert chosen(8192, gathers=True) == (0, 528)


@pytest.mark.parametrize("along, splits", [(0, False), (0, True), (128, True)])
def test_quantized_gemms_take_the_kernel_that_has_room(along, splits):
    kernel = "split" if splits else "tensor_scaled"

    def chosen(groups, device=H100):
        gemm = dataclasses.replace(quantized_rows(along, groups, device), splits=splits)
        return quantized.choose_rows(gemm).kernel

    def of_weights(groups, device=H100):
        return quantized.choose_weights(quantized_weights(along, groups, device))

    assert chosen(8) == chosen(1024) == kernel and of_weights(8).kernel == "split"
    assert chosen(1025) == chosen(8, NO_NVRTC) == chosen(8, B200) == "triton"
    assert of_weights(8, NO_NVRTC).kernel == of_weights(8, B200).kernel == "triton"
    most, stages = (3904, 2) if along else (3136, 3)
    assert (of_weights(most).kernel, of_weights(most).tiles.stages) == ("split", stages)
    assert of_weights(most + 1).kernel == "triton"


def test_blocks_of_32_are_widened_before_gpus_that_multiply_them():
    for choose, gemm in (
        (quantized.choose_rows, quantized_rows(32)),
        (quantized.choose_weights, quantized_weights(32)),
    ):
        kernels = [
            choose(dataclasses.replace(gemm, device=d)).kernel for d in (H100, NO_NVRTC, B200)
        ]
        assert kernels == ["bfloat16", "bfloat16", "triton"]


def test_quantizers_in_cuda_are_for_hopper_and_16_bytes():
    def kernel(rows=4096, width=1536, dtype=BF16, of_d=BF16, block=128, device=H100):
        activated = quantize.Activated(rows, width, dtype, block, device, of_d)
        return quantize.choose_activation(activated).kernel

    assert kernel() == kernel(width=1544) == kernel(rows=4088, block=32) == "cuda"
    assert kernel(dtype=F32, of_d=F32) == kernel(of_d=F32) == "triton"
    assert kernel(rows=4088) == kernel(width=1540) == "triton"
    assert kernel(device=B200) == kernel(device=NO_NVRTC) == "triton"


def test_copies_along_the_rows_are_transposed_for_hopper_alone():
    def transposed(block, device=H100):
        return quantize.choose_both(quantize.Rows(64, 64, BF16, block, device)).transposed

    assert transposed(128) and transposed(128, NO_NVRTC)
    assert not transposed(32) and not transposed(128, B200)
    scaled = quantize.Rows(64, 64, BF16, 0, H100)
    assert [quantize.choose_scaled(scaled, twice=t).transposed for t in (False, True)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "tokens, across, panel",
    [(40960, 6, 1), (24576, 12, 2), (4096, 9, 9), (4096, 32, 8), (2**20, 4, 1)],
)
def test_panels_of_tokens_fit_into_half_of_l2(tokens, across, panel):
    """And divide what lies beside each other."""
    assert quantize.choose_panel(tokens, 2 * quantize.BOTH.columns, across) == panel


def test_weights_are_transposed_for_hoppers_kernel_of_the_forward_alone():
    """Not what other kernels read, or the reference."""

    def transposed(E=8, K=512, B=2, N=768, block=128, device=H100):
        weights = quantize.Square(E, K, B, N, block, device)
        return quantize.choose_square(weights).transposed

    assert transposed() and transposed(K=1504) and transposed(B=1, N=1504) and transposed(E=1024)
    assert not transposed(device=B200) and not transposed(device=NO_NVRTC)
    assert not transposed(block=32) and not transposed(E=1025)
    assert not transposed(K=1500) and not transposed(N=1504) and not transposed(B=1, N=1500)
    # With a scale per matrix, which has no parts.
    assert transposed(B=1, block=0) and not transposed(B=1, block=0, device=B200)
    assert not transposed(B=1, block=0, device=NO_NVRTC)
    assert not transposed(B=1, block=0, E=1025) and not transposed(B=1, N=1500, block=0)


def test_long_activations_have_a_queue():
    """Of at least sixteen tiles of 128 x 128, or of 32 x 128, for each program."""

    def chosen(C, F, block=128, device=H100, dtype=BF16):
        return quantize.choose_activation(quantize.Activated(C, F, dtype, block, device))

    assert chosen(2112 * 128, 128).queued and not chosen(2111 * 128, 128).queued
    assert chosen(1056 * 128 - 16, 4096, 32).queued and not chosen(4096, 128, 32).queued
    among = dataclasses.replace(H100, alone=False)
    assert chosen(65536, 8192, device=among).programs == 132
    assert not chosen(65536, 8192, device=B200).queued
    assert not chosen(65536, 8192, dtype=jnp.dtype("float32")).queued


@pytest.mark.parametrize("parts", [(), (1,), (2,), (1, 2)])
def test_a_weight_is_transposed_exactly_where_its_forward_reads_it_so(parts):
    """By shapes of [E, K, *parts, N]: where the op takes a kernel, and that is Hopper's."""
    formats, found = Float8BlockScaling().formats(), set()

    def in_blocks(shape, format, block):
        data = jax.ShapeDtypeStruct(shape, format.dtype)
        return QuantizedArray(data, None, block=block, format=format, dtype=BF16)

    for E, K, N in itertools.product((8, 1024, 1025), (96, 100), (48, 40, 384)):
        x = in_blocks((1, 8, K), formats.x, (1, 1, 128))
        w = in_blocks((E, K, *parts, N), formats.weight, (1, 128, *(1,) * len(parts), 128))
        reason = pair.rows_unsupported(x, w, w.shape[1:], BF16)
        B = math.prod(parts)
        gemm = quantized.Rows(8, K, B * N, E, jnp.dtype(E4M3), BF16, H100, 128)
        read = reason is None and quantized.choose_rows(gemm).kernel == "split"
        assert quantize.Square(E, K, B, N, 128, H100).transposed == read, (E, K, N)
        found.add(read)
    assert found == {True, False}


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_is_chosen_fits(device):
    """Into the shared memory and registers of a multiprocessor, with at least the stages that the kernel needs."""
    for out, groups, N in itertools.product(
        OUTPUTS, (1, 8, 1024, 1025, 3136, 3648, 4096), (64, 4096)
    ):
        gemms = [
            plain.choose_rows(rows(4096, 1024, N, groups, device, out)),
            plain.choose_gathered(rows(4096, 1024, N, groups, device, out)),
            plain.choose_weights(plain.Weights(4096, (1024, N), groups, out, device)),
        ]
        for config in gemms:
            fits(config, groups, out, itemsize=2)
        for along in (0, 32, 128):
            of_rows = quantized_rows(along, groups, device, out, (4096, 1024, N))
            of_weights = quantized_weights(along, groups, device, out, (4096, (1024, N)))
            fits(quantized.choose_rows(of_rows), groups, out, itemsize=1)
            fits(quantized.choose_weights(of_weights), groups, out, itemsize=1)


def fits(config, groups, out, itemsize):
    tiles = config.tiles
    if tiles is None:
        assert config.kernel == "bfloat16"
        return
    assert config.programs > 0
    if isinstance(tiles, plain.Tiles):
        shared = tiles.stages * tiles.k * (tiles.m + tiles.n) * itemsize
        assert tiles.m * tiles.n <= REGISTERS // 2, "sums of float32 leave no registers"
        assert shared <= plain.SHARED_BYTES
        return
    less, more = tiles.registers
    assert 128 * (less + 2 * more) <= REGISTERS and less % 8 == more % 8 == 0
    assert config.programs % 2 == 0 or config.kernel == "split", "clusters are of two"
    if isinstance(tiles, plain.WeightTiles):
        assert tiles.stages >= tiles.min_stages
        taken = 1024 + tiles.stages_at(out) + tiles.stages * tiles.stage_bytes + 16 * groups
    elif isinstance(tiles, quantized.BlockTiles):
        assert tiles.stages >= 2
        staged = 128 * 256 * 2 if out.itemsize == 2 else 128 * 128 * 4
        taken = staged + tiles.stages * 48 * 1024 + 320 + 8 * (groups + 1)
    else:
        assert groups <= plain.MAX_GROUPS
        taken = (
            0  # the kernel's text takes what is left, and does not compile if that is too little
        )
    assert taken <= plain.SHARED_BYTES


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
# The latter of a size that has a queue.
@pytest.mark.parametrize("num_rows", [4096, 65536])
def test_quantizers_in_cuda_fit(recipe, gradient, num_rows):
    format = recipe.formats().x
    activated = quantize.Activated(
        num_rows, 1536, BF16, format.block[1], H100, BF16 if gradient else None
    )
    config = quantize.choose_activation(activated)
    options = dict(activation=Activation(), format=format, gradient=gradient)
    source = activate_quantize.source(BF16, config=config, weighted=gradient, **options)
    assert config.kernel == "cuda" and config.tiles.programs * source.shared <= plain.SHARED_BYTES
    config = quantize.choose_requantize(quantize.Rows(4096, 1536, BF16, 128, H100))
    source = grouped_requantize.source(BF16, config=config, format=Float8BlockScaling().formats().x)
    assert config.kernel == "cuda" and config.tiles.programs * source.shared <= plain.SHARED_BYTES
    formats = Float8BlockScaling().formats()
    config = quantize.choose_both(quantize.Rows(num_rows, 2048, BF16, 128, H100))
    source = quantize_both.source(BF16, config=config, format=formats.x, panel=2)
    assert config.kernel == "cuda" and config.queued == (num_rows == 65536)
    assert config.tiles.programs * source.shared <= plain.SHARED_BYTES
    for recipe in (Float8BlockScaling(), Float8CurrentScaling()):
        format = recipe.formats().weight
        weights = quantize.Square(8, 512, 1, 768, 128 if format.block else 0, H100)
        config = quantize.choose_square(weights)
        source = quantize_square.source(F32, config=config, format=format, both=True)
        assert (
            config.kernel == "cuda" and config.tiles.programs * source.shared <= plain.SHARED_BYTES
        )


def test_every_kernel_can_be_chosen():
    sizes = itertools.product((63, 4096, 16384), (1024, 28672), (8, 4096), DEVICES)
    found = {"rows": set(), "weights": set(), "quantized rows": set(), "quantized weights": set()}
    for (num_rows, K, groups, device), out in itertools.product(sizes, OUTPUTS):
        found["rows"].add(tiles_of(plain.choose_rows(rows(num_rows, K, 4096, groups, device, out))))
        weights = plain.Weights(num_rows, (K, 4096), groups, out, device)
        found["weights"].add(tiles_of(plain.choose_weights(weights)))
        for along in (0, 32, 128):
            for splits in (False, True):
                of_rows = quantized_rows(along, groups, device, out)
                chosen = quantized.choose_rows(dataclasses.replace(of_rows, splits=splits))
                found["quantized rows"].add(chosen.kernel)
            of_weights = quantized_weights(along, groups, device, out)
            found["quantized weights"].add(quantized.choose_weights(of_weights).kernel)
    assert found["rows"] == {("triton", None), ("cuda", 1), ("cuda", 2)}
    assert found["weights"] == {("triton", None), ("cuda", 0), ("cuda", 1), ("cuda", 4)}
    assert found["quantized weights"] == {"triton", "bfloat16", "split"}
    assert found["quantized rows"] == {"triton", "bfloat16", "split", "tensor_scaled"}


def tiles_of(config):
    """The kernel, and what tells its tiles apart."""
    tiles = config.tiles
    return config.kernel, getattr(tiles, "boxes", getattr(tiles, "strips", None))


def test_programs_take_turns_among_devices():
    """Each has MIN_STEPS at least, and a multiprocessor four at most."""
    among, least = Device(alone=False), 132 * MIN_STEPS
    steps = 0, 2 * least - 1, 2 * least, 9 * least
    assert [among.programs(n) for n in steps] == [132, 132, 264, 528]
    assert Device().programs(9 * least) == 132


def test_without_a_gpu_the_device_is_an_h100(monkeypatch):
    monkeypatch.setattr(_jax, "local_gpu", lambda: None)
    assert dataclasses.replace(current_device(), nvrtc=True) == Device()
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, found = jax.sharding.PartitionSpec("a"), []

    def inside(x):
        found.append(current_device().alone)
        return x

    jax.eval_shape(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec), jnp.zeros(2))
    assert found == [False] and launcher.capability() == 90


@pytest.mark.parametrize(
    "widths, out, crosswise, gathers",
    [
        ((768, 1536), BF16, False, True),
        ((768, 1552), BF16, False, False),
        ((1536, 768), BF16, True, True),
        ((1552, 768), BF16, True, False),
        ((768, 512), F32, False, True),
        ((512, 768), F32, True, False),  # its sums leave in another order
    ],
)
def test_which_weight_gradients_read_tokens_in_place(widths, out, crosswise, gathers):
    """By what was measured: the operand beside the tokens is narrow; and on Hopper alone."""
    for device, runs in ((H100, gathers), (B200, False), (NO_NVRTC, False)):
        gemm = quantized.Weights(2**17, widths, 64, out, device, 0)
        config = quantized.choose_weights(gemm)
        assert quantized.gathers_weights(gemm, config, crosswise=crosswise) == runs

"""Copies of weights over "nvlink": what the calls ask for, parts and words by a stand-in, and on GPUs the kernels."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.test_nvlink import delayed, explicit_mesh, need_gpus, stall
from expertmesh.ep import Copies, _native, copy_experts, transports
from expertmesh.ep.transports import BY_NAME, nvlink_by_row, reach
from expertmesh.ep.transports.nvlink_by_row import NvlinkByRow

R, E, S = 8, 16, 2
EP = PartitionSpec("ep")
# Two copies of expert 0, one of expert 5 beside one of expert 0, and slots that hold nothing.
HELD = np.array(
    [[-1, -1], [0, -1], [5, 0], [-1, 9], [-1, -1], [15, 2], [-1, -1], [-1, -1]], np.int32
)


@pytest.fixture
def on_cuda(monkeypatch):
    """Programs are traced as if these devices were GPUs."""
    monkeypatch.setattr(transports, "platform_of", lambda *operands: "cuda")


def copies_of(transport, held=HELD):
    return Copies(jnp.asarray(held), ("ep",), transport)


def lowered(transport, shape=(E, 96, 40), dtype=jnp.bfloat16):
    """The copies of a weight and their gradient for CUDA, in StableHLO."""
    mesh = jax.make_mesh((R,), ("ep",), axis_types=(AxisType.Explicit,))
    w = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, EP))

    def run(w):
        out, pull = jax.vjp(lambda w: copy_experts(w, copies_of(transport)), w)
        return pull(out)

    return jax.jit(run).trace(w).lower(lowering_platforms=("cuda",)).as_text()


def attributes(text, name):
    """Of each call of a target: its integers by name."""
    calls = re.findall(rf"@{name}\(.*", text)
    return [{k: int(v) for k, v in re.findall(r"(\w+) = (\d+) : i64", call)} for call in calls]


def test_calls_stage_the_rows_that_arrive(on_cuda):
    """S rows of bfloat16 there, R S of float32 back, in whole lines of memory; by their tokens there were E."""
    text = lowered("nvlink")
    (there,) = attributes(text, _native.DISPATCH_BY_ROW)
    (back,) = attributes(text, _native.COMBINE_BY_ROW)
    assert there["rows"] == S and there["stride"] == 96 * 40 * 2
    assert back["rows"] == R * S and back["stride"] == 96 * 40 * 4
    assert there["senders"] + there["receivers"] == back["senders"] + back["receivers"] == 132
    assert "all_to_all" not in text


def test_long_rows_go_in_slices_and_sums_in_parts(on_cuda):
    """4096 x 4096: 32 KB slices; twice 256 MiB hold a quarter of the float32 sums of 16 copies."""
    text = lowered("nvlink:48", (E, 4096, 4096))
    (there,) = attributes(text, _native.DISPATCH_BY_ROW)
    back = attributes(text, _native.COMBINE_BY_ROW)
    assert there["slices"] == 4096 * 4096 * 2 / 2**15
    assert there["senders"] + there["receivers"] == 48
    assert [call["rows"] * call["stride"] for call in back] == [2**28] * 4


@pytest.mark.parametrize("transport", ["auto", "all_to_all", "ring", "two_level"])
def test_others_exchange_blocks(on_cuda, transport):
    text = lowered(transport)
    assert "all_to_all" in text and "nvlink" not in text


def test_auto_takes_it_where_it_runs(on_cuda, monkeypatch):
    monkeypatch.setattr(transports, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(reach, "unsupported", lambda: None)
    # Of another shape: the other "auto" is traced already.
    assert _native.DISPATCH_BY_ROW in lowered("auto", (E, 96, 48))


def test_what_the_kernels_cannot_add_goes_by_blocks(on_cuda):
    """Ranks are choices here, of which there are fewer; and float64 is not added."""
    with jax.enable_x64(True):
        text = lowered("nvlink", dtype=jnp.float64)
    assert "all_to_all" in text and "nvlink" not in text


class StandIn:
    """In place of the kernels: the exchange of blocks, of what they are given."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(
            NvlinkByRow, "_call", lambda _, *arguments, **named: self(*arguments, **named)
        )

    def __call__(
        self,
        target,
        types,
        payload,
        route,
        axis,
        senders,
        row_bytes,
        slices,
        wire=0,
        staging_rows=0,
    ):
        self.calls.append((target, row_bytes, staging_rows))
        assert all(x.shape[1] * x.dtype.itemsize % 16 == 0 for x in payload) and slices >= 1
        other = BY_NAME["all_to_all"]
        move = other.dispatch if target == _native.DISPATCH_BY_ROW else other.combine
        out = [move(x, route, axis=axis) for x in payload]
        assert [(x.shape, x.dtype) for x in out] == [(x.shape, x.dtype) for x in types]
        return tuple(out)


def put(x, mesh):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, EP), lambda at: x[at])


def both_ways(w, g, held, transport):
    """Weights of slots, and the gradient of g."""
    out, pull = jax.vjp(lambda w: copy_experts(w, copies_of(transport, held)), w)
    return out, pull(g)[0]


@pytest.mark.parametrize("shape", [(3, 5), (64,), (1,), (0,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_words_and_parts_change_nothing(on_cuda, monkeypatch, shape, dtype):
    stand_in = StandIn(monkeypatch)
    monkeypatch.setattr(nvlink_by_row, "HALF", 8 * 4 * R * S * 2)  # of two words
    mesh = explicit_mesh((R,))
    rng = np.random.default_rng(0)
    w, g = (put(rng.normal(size=(n, *shape)).astype(dtype), mesh) for n in (E, E + R * S))
    with jax.set_mesh(mesh):  # which operands without elements do not tell
        got, want = (
            jax.jit(partial(both_ways, held=HELD, transport=t))(w, g)
            for t in ("nvlink", "all_to_all")
        )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    adds = [call for call in stand_in.calls if call[0] == _native.COMBINE_BY_ROW]
    assert len(adds) == max(1, -(-np.prod(shape) // 16))
    assert all(rows * row_bytes <= nvlink_by_row.HALF for _, row_bytes, rows in adds)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_8_bits_travel_as_they_are(on_cuda, monkeypatch, dtype):
    stand_in, mesh = StandIn(monkeypatch), explicit_mesh((R,))
    w = put(np.arange(E * 24).reshape(E, 24).astype(np.uint8).view(dtype), mesh)
    got, want = (copy_experts(w, copies_of(t)) for t in ("nvlink", "all_to_all"))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    assert stand_in.calls == [(_native.DISPATCH_BY_ROW, 32, S)]


def held_at(mesh):
    """All slots hold copies, of the next rank's experts."""
    return ((np.arange(mesh.size)[:, None] + 1) % mesh.size * 8 + [5, 2]).astype(np.int32)


def unlike(mesh, shape=(24, 40), dtype="bfloat16", steps=1, transport="nvlink"):
    """In how many elements copies and gradients over "nvlink" are unlike those by blocks, some ranks being late."""
    num, rng = 8 * mesh.size, np.random.default_rng(0)
    w, g = (
        put(rng.normal(size=(n, *shape)).astype(dtype), mesh) for n in (num, num + S * mesh.size)
    )
    plan = held_at(mesh)
    holds = np.argwhere(plan >= 0)

    def step(w, g, wrong, i):
        # One after the other, slots hold nothing.
        slot = jnp.asarray(holds)[i % len(holds)]
        held = jnp.asarray(plan).at[slot[0], slot[1]].set(-1)
        late = delayed(w.reshape(num, -1), i, mesh).reshape(w.shape)
        got, want = (both_ways(late, g, held, t) for t in (transport, "all_to_all"))
        return wrong + sum(jnp.sum(a != b) for a, b in zip(got, want, strict=True)), None

    with jax.set_mesh(mesh):
        run = jax.jit(lambda w, g: jax.lax.scan(partial(step, w, g), 0, jnp.arange(steps))[0])
        return [len(holds), int(run(w, g))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(24, 40), (3, 5), (1,), (512, 1536)])
def test_the_kernels_equal_blocks(shape, dtype):
    need_gpus(2)
    holds, wrong = unlike(explicit_mesh((len(jax.devices("cuda")),)), shape, dtype, steps=4)
    assert holds and not wrong and not stall()


@pytest.mark.gpu
def test_many_steps_in_parts_on_few_sms(monkeypatch):
    need_gpus(2)
    monkeypatch.setattr(nvlink_by_row, "HALF", 2**16)
    for transport in ("nvlink", "nvlink:2"):
        holds, wrong = unlike(explicit_mesh((2,)), (64, 264), steps=500, transport=transport)
        assert holds and not wrong


@pytest.mark.gpu
def test_8_bits_by_the_kernels():
    need_gpus(2)
    mesh = explicit_mesh((2,))
    w = put(np.random.default_rng(0).integers(0, 255, (16, 333, 16)).astype(np.uint8), mesh)
    held = held_at(mesh)
    with jax.set_mesh(mesh):
        got, want = (copy_experts(w, copies_of(t, held)) for t in ("nvlink", "all_to_all"))
    np.testing.assert_array_equal(got, want)


def check_processes():
    return unlike(explicit_mesh((jax.device_count(),)), steps=20)


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_one_gpu_per_process(multiprocess):
    first, second = multiprocess("ep.test_nvlink_by_row:check_processes", processes=2, devices=1)
    assert first == second and first[0] and not first[1]

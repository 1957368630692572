"""The transport "nvlink": what it refuses, what it asks XLA for, and on GPUs the exchanges of the other transports."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import time
from functools import partial
from shutil import which
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_case import Case, operands_of, run_case
from ep.exchange_oracle import routing
from expertmesh.core import TensorFormat, quantize
from expertmesh.ep import (
    EpConfig,
    _native,
    agreement,
    bootstrap,
    combine,
    dispatch,
    is_supported,
    prepare,
    raise_stall,
    transports,
)
from expertmesh.ep._native import kernels
from expertmesh.ep.transports import choose_auto, nvlink, reach
from expertmesh.ep.transports.choice import Exchange

CASE = Case(transport="nvlink")
FP8 = TensorFormat(dtype="float8_e4m3fn", block=(1, 128), scale="float32")


@pytest.fixture
def on_cuda(monkeypatch):
    """Programs are traced as if these devices were GPUs."""
    monkeypatch.setattr(transports, "platform_of", lambda *operands: "cuda")


def lowered(case, names=("ep",), sizes=(8,), axis="ep", tokens=48):
    """A dispatch and a combine for CUDA, in StableHLO."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
    sharding = NamedSharding(mesh, PartitionSpec(names))

    def run(topk, tokens):
        handle = prepare(topk, dataclasses.replace(case.config, axis=axis))
        return combine(handle, dispatch(handle, tokens))

    operands = (
        jax.ShapeDtypeStruct((tokens, case.K), jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct((tokens, case.D), jnp.bfloat16, sharding=sharding),
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
    # In whole lines of memory: bfloat16 there, float32 back.
    text = lowered(dataclasses.replace(CASE, D=96, K=3))
    assert "stride = 256 : i64" in text and "stride = 384 : i64" in text
    text = lowered(dataclasses.replace(CASE, D=96, K=1))
    assert "stride = 256 : i64" in text and "stride = 384 : i64" not in text


@pytest.mark.parametrize(
    "tokens, features, there, back", [(4096, 7168, 1, 2), (4096, 512, 1, 1), (128, 7168, 4, 4)]
)
def test_slices_of_few_tokens_and_of_long_sums(on_cuda, tokens, features, there, back):
    text = lowered(dataclasses.replace(CASE, D=features), tokens=8 * tokens)
    assert re.findall(r"slices = (\d+) : i64", text) == [str(there), str(back)]


def test_cpu_says_so_when_traced():
    with pytest.raises(ValueError) as error:
        lowered(CASE)
    for words in ("'nvlink'", "ep_size=8", "NVIDIA GPUs", "platform is cpu", "transport='auto'"):
        assert words in str(error.value)


@pytest.mark.parametrize("function", ["dispatch", "combine"])
def test_who_cannot_run_is_who_was_called(function):
    """The transport is the call's own."""
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Explicit,))
    topk, x = jax.device_put(
        (np.zeros((16, 2), np.int32), np.zeros((16, 4), np.float32)),
        NamedSharding(mesh, PartitionSpec("ep")),
    )
    handle = prepare(topk, EpConfig(num_experts=8, axis="ep"))
    rows = dispatch(handle, x)
    with pytest.raises(ValueError, match=f"^{function}: transport='nvlink' cannot run: "):
        if function == "dispatch":
            dispatch(handle, x, transport="nvlink")
        else:
            combine(handle, rows, transport="nvlink")


def test_rows_without_features_need_no_kernel(on_cuda):
    assert "nvlink" not in lowered(dataclasses.replace(CASE, D=0))


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


@pytest.fixture
def runs(monkeypatch):
    """Its kernels compile, and all GPUs are linked."""
    monkeypatch.setattr(transports, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(nvlink, "platform_unsupported", lambda platform: None)
    monkeypatch.setattr(reach, "unsupported", lambda: None)


EXCHANGE = Exchange(
    num_tokens=64, top_k=8, capacity=64, ep_size=4, dtype="bfloat16", platform="cuda"
)


def test_auto_takes_it_where_it_runs(runs):
    assert choose_auto(EXCHANGE) == "nvlink"
    assert choose_auto(dataclasses.replace(EXCHANGE, platform="cpu")) == "ring"
    assert choose_auto(dataclasses.replace(EXCHANGE, ep_size=1)) == "local"


@pytest.mark.parametrize(
    "what, reason",
    [
        (
            (nvlink, "platform_unsupported", lambda platform: "nvcc is not on the PATH"),
            "nvcc is not",
        ),
        ((reach, "unsupported", lambda: "not every two GPUs"), "not every two GPUs"),
        ((nvlink, "MAX_RANKS", 2), "got ep_size=4"),
    ],
)
def test_auto_says_once_why_it_takes_another(runs, monkeypatch, what, reason):
    monkeypatch.setattr(*what)
    transports._say.cache_clear()
    with pytest.warns(RuntimeWarning, match=reason) as said:
        for num_tokens in 64, 96:
            exchange = dataclasses.replace(EXCHANGE, num_tokens=num_tokens, capacity=128)
            assert choose_auto(exchange) == "ring"
    assert len(said) == 1


def test_auto_says_what_it_takes_and_by_which_bytes(runs, monkeypatch):
    """For each of 3 others 64 tokens, or 16 rows, of 2 bytes there and 4 back."""
    monkeypatch.setattr(reach, "unsupported", lambda: "PCIe")
    transports._say.cache_clear()
    small = dataclasses.replace(EXCHANGE, capacity=16)
    for exchange, taken, blocks in ((EXCHANGE, "ring", 64), (small, "all_to_all", 16)):
        with pytest.warns(RuntimeWarning) as said:
            assert choose_auto(exchange) == taken
        (words,) = (str(each.message) for each in said)
        assert f"takes {taken!r}, by the bytes" in words and words.endswith(": PCIe")
        assert f"'ring' {3 * 64 * 6}, 'all_to_all' {3 * blocks * 6};" in words


def test_processes_that_see_other_links_do_not_exchange(runs, monkeypatch):
    """Each chooses by itself, so what it sees is of what all compare."""
    monkeypatch.setattr(agreement, "platform_of", lambda: "cuda")
    found = []
    for transport in ("auto", "ring", "two_level", "two_level:nvlink"):
        config = EpConfig(num_experts=8, transport=transport)
        facts = []
        for reason in (None, "the driver shows 1 of the job's 2 GPUs", "another reason"):
            monkeypatch.setattr(reach, "unsupported", lambda reason=reason: reason)
            facts.append(agreement.checksum(agreement.facts_of(config, (16,), 2, {"ep": 2})))
        assert facts[1] == facts[2]
        found.append(facts[0] != facts[1])
    assert found == [True, False, True, False]


@pytest.mark.parametrize(
    "indices, words",
    [([None, None], "on 2 hosts"), ([0, 1], "on 2 hosts"), ([0, 0], "cannot be asked for links")],
)
def test_gpus_of_several_hosts_are_not_known_to_be_linked(monkeypatch, indices, words):
    """Where XLA counts no hosts, each process is one."""
    devices = [
        SimpleNamespace(slice_index=index, process_index=process)
        for process, index in enumerate(indices)
    ]
    monkeypatch.setattr(jax, "devices", lambda platform: devices)
    monkeypatch.setattr(reach, "_LIBRARY", "no_such_library.so")
    assert words in reach.unsupported.__wrapped__()


def test_compiling_for_gpus_that_are_not_here_takes_another(runs, monkeypatch):
    monkeypatch.setattr(transports, "compute_capability", lambda: None)
    assert choose_auto(EXCHANGE) == "ring"


def test_a_limit_of_sms_is_part_of_the_name(on_cuda):
    text = lowered(dataclasses.replace(CASE, transport="nvlink:48"))
    found = re.findall(r"receivers = (\d+) : i64.*?senders = (\d+) : i64", text)
    assert len(found) == 2 and {sum(map(int, pair)) for pair in found} == {48}


@pytest.mark.parametrize("name", ["nvlink:1", "nvlink:", "ring:48", "nvlink:x", 48])
def test_a_limit_that_is_none(name):
    with pytest.raises(ValueError, match="nvlink:N"):
        EpConfig(num_experts=8, transport=name)


@pytest.mark.parametrize("sms, senders", [(132, 33), (48, 12), (3, 1), (2, 1)])
def test_senders_are_as_many_as_there_is_to_send(sms, senders):
    assert nvlink.Nvlink(sms)._senders(1, 3) == senders
    assert nvlink.Nvlink(sms)._senders(0, 1) == 1
    assert nvlink.Nvlink(sms)._senders(1, 0) == sms - 1


@pytest.mark.parametrize(
    "tokens, features, senders",
    # 16 warps of an SM have a row each, of 14336 or 7168 bytes, or what fits of one of 57344: 3.6 MB. Of shorter rows,
    # and of a fourth of a row, those with their share of the work are too few for that.
    [(4096, 7168, 16), (4096, 3584, 31), (4096, 28672, 16), (4096, 2048, 44), (128, 7168, 44)],
)
def test_a_dispatch_has_no_more_senders_than_fill_the_links(on_cuda, tokens, features, senders):
    """A combine's senders have sums to make: half of the SMs."""
    text = lowered(dataclasses.replace(CASE, D=features), tokens=8 * tokens)
    assert re.findall(r"senders = (\d+) : i64", text) == [str(senders), "66"]


def test_limits_and_types_are_those_of_the_kernels():
    header = (pathlib.Path(_native.__file__).parent / "exchange.h").read_text()
    known = {name: int(value) for name, value in re.findall(r"int (k\w+) = (\d+);", header)}
    assert (nvlink.WARPS, nvlink.STAGED) == (known["kWarps"], known["kSmemStaging"])
    assert (nvlink.MAX_RANKS, nvlink.MAX_CHOICES) == (known["kMaxRanks"], known["kMaxChoices"])
    (types,) = re.findall(r"enum class Type : int32_t \{ (.*) \};", header)
    names = {"kF32": "float32", "kBF16": "bfloat16", "kF16": "float16"}
    assert {names[kind]: number for number, kind in enumerate(types.split(", "))} == nvlink.WIRES


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


def differences(mesh, steps=1, tokens=256, features=1024, name="nvlink", options=None):
    """Exchanges by `name` against "all_to_all", compared on the devices: wrong elements, and the largest error.

    `options` are the compiler's.
    """
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
        rows, want = (dispatch(handle, x, transport=t) for t in (name, "all_to_all"))
        out, like = (combine(handle, want, transport=t) for t in (name, "all_to_all"))
        again = combine(handle, want, transport=name)
        error = jnp.max(jnp.abs(out.astype(jnp.float32) - like.astype(jnp.float32)))
        wrong = jnp.sum(rows != want) + jnp.sum(out != again)
        return (topk, (out / (1 + jnp.max(jnp.abs(out)))).astype(x.dtype)), (wrong, error)

    def run(topk, x):
        _, (wrong, error) = jax.lax.scan(step, (topk, x), jnp.arange(steps))
        return jnp.sum(wrong), jnp.max(error)

    with jax.set_mesh(mesh):
        wrong, error = jax.jit(run, compiler_options=options)(topk, x)
    return [int(wrong), float(error)]


def explicit_mesh(sizes, names=("ep",)):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, steps, tokens",
    [("nvlink", 10_000, 64), ("nvlink:2", 500, 512)],  # few warps flag several rows at once
)
def test_many_steps_in_a_scan(name, steps, tokens):
    need_gpus(2)
    wrong, error = differences(explicit_mesh((2,)), steps, tokens, features=264, name=name)
    assert wrong == 0 and error < 0.1


@pytest.mark.gpu
def test_command_buffers_leave_it_out():
    """XLA captures neither the exchange nor a loop that has one, whatever it may capture."""
    need_gpus(2)
    options = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    }
    wrong, error = differences(explicit_mesh((2,)), steps=50, options=options)
    assert wrong == 0 and error < 0.1


def wrong_beside_collectives(mesh, name, steps):
    """Of dispatches and of all-gathers of other operands, each late in turn: elements that are not what was sent."""
    each = NamedSharding(mesh, jax.P(mesh.axis_names))
    num, config = 64 * mesh.size, EpConfig(num_experts=8 * mesh.size, axis="ep")
    topk = jax.device_put(routing("skewed", num, 4, 8 * mesh.size), each)
    whole = np.random.default_rng(0).normal(size=(num, 264)).astype(jnp.bfloat16)

    def run(topk, x, whole):
        handle = prepare(topk, config)
        want = dispatch(handle, x, transport="all_to_all")

        def step(wrong, i):
            rows = dispatch(handle, delayed(x, i, mesh), transport=name)
            gathered = jax.sharding.reshard(delayed(x, i + 1, mesh), jax.P())
            return wrong + jnp.sum(rows != want) + jnp.sum(gathered != whole), None

        return jax.lax.scan(step, 0, jnp.arange(steps))[0]

    with jax.set_mesh(mesh):
        return int(jax.jit(run)(topk, jax.device_put(whole, each), whole))


@pytest.mark.gpu
def test_beside_collectives_of_xla():
    """One rank comes to the exchange first, another to XLA's collective on its own stream: both go on."""
    need_gpus(2)
    assert wrong_beside_collectives(explicit_mesh((2,)), "nvlink", steps=2000) == 0
    assert not stall()


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
def test_auto_takes_it_between_linked_gpus():
    need_gpus(2)
    if reach.unsupported():
        pytest.skip(reach.unsupported())
    mesh = explicit_mesh((2,))
    with jax.set_mesh(mesh):
        topk = jax.sharding.reshard(jnp.asarray(routing("holes", 80, 3, 8)), jax.P("ep"))
        x = jax.sharding.reshard(jnp.ones((80, 256)), jax.P("ep"))
        config = EpConfig(num_experts=8, axis="ep")
        lower = jax.jit(lambda topk, x: dispatch(prepare(topk, config), x)).lower
        assert _native.DISPATCH in lower(topk, x).as_text()
        assert bootstrap(config, x, top_k=3).transport == "nvlink"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvlink:2", "nvlink:48"])
def test_few_sms(name):
    need_gpus(2)
    case = dataclasses.replace(GPU, transport=name, sizes=(640,), D=512)
    run_case(case, "explicit", "bfloat16", kinds=("uniform", "holes"))


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


LATE_MS = 300


def late_step(mesh, num=23, features=72):
    """A dispatch of ones, `run(delay)`, in which rank 1 comes after `delay` multiplications; and its handle."""
    each = jax.P("ep")
    sharding = NamedSharding(mesh, each)

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    topk = np.stack([np.arange(2 * num) % 8, (np.arange(2 * num) + 4) % 8], axis=1).astype(np.int32)
    config = EpConfig(num_experts=8, axis="ep", transport="nvlink")
    on_shards = partial(jax.shard_map, mesh=mesh, out_specs=each, check_vma=False)
    # Apart from the step: XLA's own collective would wait for the late rank.
    handle = jax.jit(on_shards(partial(prepare, config=config), in_specs=each))(put(topk))

    def step(handle, x, delay):
        late = jnp.where(jax.lax.axis_index("ep") == 1, delay, 0)
        a = jnp.full((1024, 1024), 1e-3) + x[0, 0]
        a = jax.lax.fori_loop(0, late, lambda _, a: jnp.tanh(a @ a), a)
        return dispatch(handle, x + jnp.minimum(jnp.abs(a[0, 0]), 0))

    run = partial(jax.jit(on_shards(step, in_specs=(each, each, jax.P()))), handle)
    return partial(run, put(np.ones((2 * num, features), np.float32))), handle


def stall() -> str:
    """What raise_stall says, or nothing."""
    try:
        raise_stall()
    except RuntimeError as error:
        return str(error)
    return ""


def wrong_rows(rows, handle, rank, late=None):
    """Of a rank: rows that are not ones, or NaN if the rank `late` should have sent them, or zeros of padding."""

    def part(x):
        return next(
            np.asarray(s.data)[0] for s in x.addressable_shards if s.index[0].start in (rank, None)
        )

    rows, source = part(rows), part(handle.source)
    num_choices = handle.row.shape[1] // handle.ep_size * handle.row.shape[2]
    want = np.where(source < 0, 0.0, 1.0)
    if late is not None:
        want[(source >= 0) & (source // num_choices == late)] = np.nan
    return int(np.sum(~np.isclose(rows, want[:, None], equal_nan=True)))


@pytest.mark.gpu
def test_a_late_rank_is_named_and_the_next_call_works(monkeypatch):
    need_gpus(2)
    monkeypatch.setattr(nvlink, "TIMEOUT_MS", LATE_MS)
    mesh = jax.make_mesh(
        (2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices("cuda")[:2]
    )
    run, handle = late_step(mesh)
    rows = run(0)
    assert not stall() and not wrong_rows(rows, handle, 0) and not wrong_rows(rows, handle, 1)
    rows = run(20_000)
    assert not wrong_rows(rows, handle, 0, late=1)
    assert re.search("rank 0 .* timed out waiting for rank 1 to send its rows", stall())
    rows = run(0)
    assert not stall() and not wrong_rows(rows, handle, 0) and not wrong_rows(rows, handle, 1)
    # A larger exchange makes a new window.
    wrong, error = differences(explicit_mesh((2,)), tokens=512, features=2048)
    assert wrong == 0 and error < 0.1


def check_stalled_process():
    """Process 1 does not call for a while; then all go on."""
    nvlink.TIMEOUT_MS = LATE_MS
    mesh, rank = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,)), jax.process_index()
    run, handle = late_step(mesh)
    found = [wrong_rows(run(0), handle, rank)]
    if rank == 1:
        time.sleep(3)
    rows = run(0)
    found += [wrong_rows(rows, handle, rank, late=1 if rank == 0 else None), stall()]
    multihost_utils.sync_global_devices("all are back")
    found += [wrong_rows(run(0), handle, rank), stall()]
    return found


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_a_process_that_stalls_is_named_and_the_next_call_works(multiprocess):
    waiting, stalled = multiprocess("ep.test_nvlink:check_stalled_process", processes=2, devices=1)
    assert "rank 0 of an EP group timed out waiting for rank 1" in waiting.pop(2)
    assert waiting == [0, 0, 0, ""] and stalled == [0, 0, "", 0, ""]


def check_killed_process():
    """Process 1 is killed while process 0 waits for it; what process 0 finds, and the seconds that it took."""
    nvlink.TIMEOUT_MS = LATE_MS
    mesh, rank = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,)), jax.process_index()
    run, handle = late_step(mesh)
    found = [wrong_rows(run(0), handle, rank)]
    multihost_utils.sync_global_devices("both have run")
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    for _ in range(3):  # later exchanges end too
        found += [wrong_rows(run(0), handle, rank, late=1), stall()]
    return [*found, time.monotonic() - start]


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_a_process_that_is_killed_is_named(multiprocess):
    survivor, _ = multiprocess(
        "ep.test_nvlink:check_killed_process", processes=2, devices=1, killed=1, timeout=60
    )
    seconds = survivor.pop()
    assert [survivor[0], *survivor[1::2]] == [0, 0, 0, 0] and seconds < 10
    assert all("rank 0 of an EP group timed out waiting for rank 1" in s for s in survivor[2::2])


@pytest.mark.gpu
def test_the_memory_in_use_is_known():
    need_gpus(2)
    differences(explicit_mesh((2,)), tokens=64, features=264)
    assert _native.window_bytes() >= 2 * 2 * 2 * 64 * 264 * 4  # ranks, halves, tokens, float32


@pytest.mark.gpu
def test_kernels_alone_with_four_ranks_touch_only_their_memory(tmp_path):
    """Built and run without JAX; ci/sanitize runs it under compute-sanitizer."""
    if which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    capability = float(jax.devices("cuda")[0].compute_capability)
    flags = ["-std=c++17", f"-arch={kernels.architecture(capability)}", f"-I{kernels.SOURCES}"]
    source, program = pathlib.Path(__file__).with_name("nvlink_alone.cu"), tmp_path / "alone"
    subprocess.run(["nvcc", *flags, source, "-o", program], check=True)
    for arguments in ((), ("--serial",)):
        run = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert run.returncode == 0 and "ok" in run.stdout, run.stdout[-2000:]

"""Every benchmark runs, on small shapes: what only a GPU machine runs breaks unseen."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from benchmarks import _measure, moe_block
from benchmarks.peers import engine

from cases.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNNABLE = load_script(ROOT / "benchmarks/__init__.py").runnable()
# Of seconds; the others are run with all that is long.
QUICK = {"group_bias"}
ALONE = {"compile_time", "moe_block", "dispatch"}  # minutes, or programs of several GPUs


def python(*arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in RUNNABLE
        if name not in ALONE
    ],
)
def test_each_runs_and_writes_its_rows(name, tmp_path):
    done = python("-m", f"benchmarks.{name}", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows and all(row["value"] >= 0 and row["reference"] for row in rows)


def test_each_finds_what_it_imports():
    names = ", ".join(f"benchmarks.{name}" for name in RUNNABLE)
    done = python("-c", f"import {names}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "others", "count"),
    [("group_bias", [".,../" + ROOT.name, "--peers"], 3), ("moe_block", ["."], 3)],
)
def test_a_tree_by_turns_with_itself(name, others, count, tmp_path):
    commits, *options = others
    arguments = "-m", "benchmarks.turns", commits, name, *options
    done = python(*arguments, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len({(row["case"], row["reference"].partition(",")[0]) for row in rows}) == count
    for row in rows:
        assert row["case"].startswith(f"{name}: ") and "ours once more" in row["reference"]


def test_a_turn_says_for_how_long_it_has_lasted(tmp_path):
    """So that a lane that waits in its turn for good can be ended."""
    turn = _measure.Turns(tmp_path, 0, 1, until=0)
    assert turn.seconds_held() == 0
    with turn.mine():
        assert 0 <= turn.seconds_held() < 600
        os.utime(tmp_path / "held0", (0, 0))
        assert turn.seconds_held() > 1e6
    assert turn.seconds_held() == 0


def test_a_peer_gets_the_same_numbers():
    """The halves of the up projection apart; and an error is that of results, not of where they lie."""
    on = engine.meshes(2, 4)
    given = engine.operands(moe_block.Shape((8, 16), 32, 64, 8, 2), on.theirs)
    params, x, _ = engine.as_ours(given, on.ours)
    gate, up = np.split(np.asarray(given[0]["wi"], np.float32), 2, axis=-1)
    np.testing.assert_array_equal(np.asarray(params["wi"], np.float32), np.stack([gate, up], 2))
    assert params["wo"].sharding.spec == given[0]["wo"].sharding.spec
    assert engine.error(x, given[1]) == 0
    assert engine.error(x, 2 * given[1]) == pytest.approx(0.5)
    assert engine.error(params["wi"], given[0]["wi"].at[:, :, 64:].multiply(0)) > 1


def weight_of(shape: str, scope: str) -> str:
    """The text of an instruction that reads such a weight."""
    kernel = f'custom-call(bf16[64,128]{{1,0}} %x, bf16[{shape}] %w), custom_call_target="launch"'
    return f'bf16[64,256]{{1,0}} {kernel}, metadata={{op_name="jit(both)/{scope}/ffi_call"}}'


@pytest.mark.parametrize(
    ("name", "text", "phase"),
    [
        ("grouped_gemm_rows", weight_of("4,128,512", "jvp(f)"), ("forward", "GEMM 1")),
        # After the backward's have begun: their order says nothing.
        ("grouped_gemm_rows", weight_of("4,256,128", "transpose(jvp(f))"), ("backward", "GEMM 2")),
        ("tensor_scaled_gemm_weights", weight_of("4,128,2,256", "transpose(jvp(f))"), ("backward", "GEMM 1")),
        ("_flat_weights_kernel", weight_of("4,256,128", "transpose(jvp(f))"), ("backward", "GEMM 2")),
        ("gathered_activation", weight_of("4,512,128", "jvp(f)"), ("forward", "GEMM 1")),
        # Of all experts: not a GPU's own.
        ("nvjet_gemm", weight_of("8,128,512", "jvp(f)"), ("forward", "other")),
        ("_spread_kernel", weight_of("1,64,128", "transpose(jvp(f))"), ("backward", "combine")),
        ("Dispatch<2>", "", ("forward", "dispatch")),
        ("grouped_requantize", "", ("forward", "quantize")),
        ("ncclDevKernel_ReduceScatter", weight_of("8,128", "transpose(f)"), ("backward", "sums over devices")),
        ("psum_21_0_fusion_1", weight_of("64,8", "transpose(f)"), ("backward", "sums over devices")),
        ("loop_add_fusion", weight_of("64,128", "transpose(f)"), ("backward", "other")),
    ],
)  # fmt: skip
def test_phase_of_a_kernel(name, text, phase):
    """By its name, whether its instruction belongs to a gradient, and which weight it reads or writes."""
    shape = moe_block.Shape((64,), 128, 256, 8, 2)
    assert moe_block.phase_of(_measure.Kernel(name, 1.0, "ffi_call.1"), text, shape, 4) == phase


def test_phase_of_a_sum_whose_instruction_is_unknown():
    """A gradient's, once the backward has begun."""
    shape = moe_block.Shape((64,), 128, 256, 8, 2)
    kernel = _measure.Kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1.0, "")
    for begun, which in ((False, "forward"), (True, "backward")):
        found = moe_block.phase_of(kernel, "", shape, 4, begun=begun)
        assert found == (which, "sums over devices")

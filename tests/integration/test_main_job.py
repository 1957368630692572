"""The main job through its command line, in processes of its own."""

import csv
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from cases.covering import full
from multiprocess_runner import free_port

pytestmark = pytest.mark.usefixtures("kept_programs")

STEPS = 20
TINY = (
    "--steps 20 --layers 1 --model-dim 32 --heads 2 --experts 8 --expert-dim 16 --seq-len 16 "
    "--eval-windows 8 --eval-every 8 --checkpoint-every 4 --log-every 1 --learning-rate 1e-2"
).split()


def command(text, out, *arguments):
    program = [sys.executable, "-m", "expertmesh.train"]
    return [*program, *TINY, "--data", str(text), "--out", str(out), *map(str, arguments)]


def start(text, out, *arguments):
    return subprocess.Popen(
        command(text, out, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(text, out, *arguments):
    """Runs to the end; returns what was printed."""
    result = subprocess.run(
        command(text, out, *arguments), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rows(out):
    """The CSV's rows as text, without the one column that is not reproducible."""
    with open(out / "metrics.csv", newline="") as stream:
        return [
            {name: text for name, text in row.items() if name != "tokens_per_second"}
            for row in csv.DictReader(stream)
        ]


def losses(out):
    return [float(row["loss"]) for row in rows(out)]


def wait_for(process, pattern):
    """Reads the process's lines until one matches."""
    for line in process.stdout:
        if re.search(pattern, line):
            return
    pytest.fail(f"no line matched {pattern!r}: {process.stderr.read()}")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some 70 kB of this folder's own sources, as one file."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    path.write_bytes(b"".join(source.read_bytes() for source in sources)[:70_000])
    return path


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing interrupts: 1 process x 8 devices, Explicit axes."""
    out = tmp_path_factory.mktemp("main_job") / "whole"
    return out, train(text, out, "--phases")


def test_files_and_lines_of_a_run(whole):
    out, printed = whole
    assert [row["step"] for row in rows(out)] == [str(step) for step in range(1, STEPS + 1)]
    assert [row["step"] for row in rows(out) if row["valid_loss"]] == ["8", "16", "20"]
    for picture in ("loss.png", "experts.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert sorted(int(step.name) for step in (out / "checkpoints").iterdir()) == [12, 16, 20]
    lines = printed.splitlines()
    assert "mesh fsdp=2 ep=4, explicit axes; tokens move by ring" in printed
    assert "8 cpu in 1 process(es)" in printed
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) == STEPS and "\r" not in printed
    assert re.fullmatch(
        r"step 8/20: loss \d\.\d+, validation \d\.\d+, \d+ tokens/s, imbalance \d\.\d+, dropped 0",
        progress[7],
    )


def test_reported_numbers_are_those_of_the_files(whole, text):
    out, printed = whole
    summary = json.loads((out / "summary.json").read_text())
    valid_loss = float(rows(out)[-1]["valid_loss"])
    assert summary["valid_loss"] == valid_loss
    assert f"validation loss        {valid_loss:.4f} nats per byte" in printed
    assert f"order-1 byte model     {summary['order1_loss']:.4f} nats per byte" in printed
    last = rows(out)[-5:]
    counts = [[int(row[f"rows_l0_e{e}"]) for row in last] for e in range(8)]
    assert sum(map(sum, counts)) == 5 * 8 * 16 * 2  # steps x sequences x bytes x top-k
    share = min(map(sum, counts)) / sum(map(sum, counts))
    assert summary["smallest_expert_share"] == pytest.approx(share)
    assert f"smallest expert share  {share:.4f}" in printed
    with open(out / "metrics.csv", newline="") as stream:
        speeds = [float(row["tokens_per_second"] or "nan") for row in csv.DictReader(stream)]
    assert summary["tokens_per_second"] == np.nanmedian(speeds) and summary["mfu"] is None
    sent = 3 * 16 * 32 * 4  # three other ranks, a sequence of 16 tokens of width 32 in float32
    legs = ("dispatch", "combine", "backward_dispatch", "backward_combine")
    assert summary["transport"] == "ring" and summary["exchange_bytes"] == dict.fromkeys(legs, sent)
    assert list(summary["phases_ms"]) == ["route", "dispatch", "experts", "combine", "backward"]
    (said,) = re.findall(r"phases of a block, ms  route (-?[\d.]+), dispatch", printed)
    assert float(said) == pytest.approx(summary["phases_ms"]["route"], abs=6e-3)
    assert f"speed                  {summary['tokens_per_second']:.0f} tokens/s; no MFU" in printed


def test_the_loss_falls(whole):
    out, _ = whole
    assert losses(out)[0] == pytest.approx(5.545, abs=0.001)  # log 256
    assert losses(out)[-1] < losses(out)[0] - 0.3


@pytest.mark.default_jax
def test_killed_with_a_corrupt_checkpoint_and_resumed(whole, text, tmp_path):
    """kill -9 at a random step, then a flipped bit in the newest checkpoint: bitwise the same run."""
    out, step = tmp_path / "run", random.randrange(9, STEPS - 1)
    process = start(text, out)
    wait_for(process, f"^step {step}/")
    process.kill()
    process.communicate()
    finished = [
        int(folder.name)
        for folder in (out / "checkpoints").iterdir()
        if (folder / "manifest.json").exists()
    ]
    newest = max(finished)
    assert len(finished) >= 2 and newest < STEPS, (step, finished)
    damaged = out / "checkpoints" / str(newest) / "state" / "manifest.ocdbt"
    *kept, last = damaged.read_bytes()
    damaged.write_bytes(bytes([*kept, last ^ 1]))
    printed = train(text, out, "--resume")
    assert f"refused the checkpoint of step {newest}: " in printed, step
    resumed_at = max(set(finished) - {newest})
    assert f"resuming after step {resumed_at}" in printed, step
    assert rows(out) == rows(whole[0]), step


@pytest.mark.default_jax
def test_microbatches_resumed(text, tmp_path, monkeypatch):
    """Two microbatches of layers that are computed again, quantized with a state: bitwise the run that went on.

    Its state and its layers' inputs are in the host's memory after that.
    """
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    out, once = tmp_path / "run", tmp_path / "once"
    options = "--layers 2 --steps 8 --batch-size 16 --grad-accum 2 --remat full --recipe fp8_delayed".split()
    assert "step 8/8" in train(text, out, *options)
    shutil.copytree(out, once)
    shutil.rmtree(out / "checkpoints" / "8")
    resumed = train(text, out, *options, "--resume", "--offload")
    assert "resuming after step 4" in resumed and "state in the host's memory" in resumed
    assert rows(out) == rows(once)


def saved_state(out, step):
    """All arrays of a checkpoint, on one device."""
    path = (out / "checkpoints" / str(step) / "state").absolute()
    place = SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            checkpointer.metadata(path).item_metadata.tree,
        )
        arrays = jax.tree.leaves_with_path(checkpointer.restore(path, like))
    return {jax.tree_util.keystr(name): np.asarray(x) for name, x in arrays}


@pytest.fixture(scope="module")
def ep_of_4(request, whole, text, tmp_path_factory):
    """A run under EP 4 and its own options: the whole one, or, by capacity, without spare slots or with one."""
    if request.param is None:
        return whole[0], []
    out = tmp_path_factory.mktemp("main_job") / "ep4"
    own = ["--capacity-factor", 4]
    options = ["--mesh", "fsdp=2,ep=4", "--spare-experts", request.param, *own]
    assert "mesh fsdp=2 ep=4" in train(text, out, *options)
    return out, own


@pytest.mark.default_jax
@pytest.mark.parametrize(
    "ep_of_4, ep, spare",
    [(None, 8, 2), *(full(*case) for case in itertools.product((0, 1), (2, 8), (0, 2)))],
    indirect=["ep_of_4"],
)
def test_ep_grows_and_shrinks_between_runs(ep_of_4, text, tmp_path, ep, spare):
    """A step under another EP, at a learning rate that float32 rounds to 0: the same parameters, bit for bit."""
    begun, own = ep_of_4
    out = tmp_path / "run"
    shutil.copytree(begun, out)
    resume = f"--resume --steps {STEPS + 1} --learning-rate 1e-300".split()
    options = ["--mesh", f"fsdp={8 // ep},ep={ep}", "--spare-experts", spare, *own]
    printed = train(text, out, *resume, *options)
    assert f"resuming after step {STEPS}" in printed and f"ep={ep}" in printed
    assert (f", {spare} spare slots a rank" in printed) == (spare > 0)
    before, after = saved_state(out, STEPS), saved_state(out, STEPS + 1)
    assert before.keys() == after.keys()
    params = [name for name in before if name.startswith("['params']")]
    moments = [name for name in before if name not in params]
    assert len(params) > 5 and any((before[name] != after[name]).any() for name in moments)
    for name in params:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert losses(out)[STEPS] == pytest.approx(losses(out)[STEPS - 1], rel=0.2)
    assert {row["dropped"] for row in rows(out)} == {"0"}


@pytest.mark.default_jax
def test_stopped_by_sigterm(text, tmp_path):
    out = tmp_path / "run"
    process = start(text, out)
    wait_for(process, "^step 2/")
    process.terminate()
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    stopped = re.search(r"stopped by SIGTERM after step (\d+); --resume continues", printed)
    assert stopped, printed + errors
    assert (out / "checkpoints" / stopped[1] / "manifest.json").exists()
    assert len(rows(out)) == int(stopped[1])


@pytest.mark.full
def test_auto_axes_train_the_same(whole, text, tmp_path):
    train(text, tmp_path / "run", "--axis-types", "auto")
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0]), rel=1e-5)


def train_in_processes(text, out, options):
    """A process for each of `options`, joined; exit codes, and what was printed."""
    joining = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", len(options))
    processes = [
        start(text, out, *joining, "--process-id", number, *own)
        for number, own in enumerate(options)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


@pytest.mark.multiprocess
@pytest.mark.default_jax
@pytest.mark.parametrize(
    "number, axes",
    [
        (2, "auto"),
        pytest.param(4, "auto", marks=pytest.mark.full),
        pytest.param(4, "explicit", marks=pytest.mark.full),
    ],
)
def test_processes_train_the_same(whole, text, tmp_path, number, axes):
    """Over the axes that one process had, and over others: 2 x 4 against 1 x 8, and Auto against Explicit."""
    joining = ("--cpu-devices", 8 // number, "--axis-types", axes)
    codes, printed = train_in_processes(text, tmp_path / "run", [joining] * number)
    assert codes == [0] * number, printed
    assert f"8 cpu in {number} process(es), mesh fsdp=2 ep=4" in printed[0][0]
    for out, _ in printed[1:]:  # Gloo's lines cannot be turned off and break into one another
        assert not re.search("step|loss|mesh|data", out), out
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[0]), rel=1e-5)
    assert len(losses(tmp_path / "run")) == STEPS


@pytest.mark.multiprocess
@pytest.mark.default_jax
@pytest.mark.parametrize(
    "name, first, second",
    [("--top-k", 2, 1), full("--capacity-factor", 1.0, 2.0), full("--seed", 0, 1)],
)
def test_processes_of_other_options_are_refused(text, tmp_path, name, first, second):
    """All of them, before the first step and before a file is written."""
    options = [("--cpu-devices", 4, name, value) for value in (first, second)]
    codes, printed = train_in_processes(text, tmp_path / "run", options)
    assert codes == [2, 2], printed
    for _, errors in printed:
        assert "train: error: start: all processes must mean the same run" in errors
        assert f"got {name}={first} in process 0, {second} in process 1; start the same" in errors
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_fit(text, tmp_path):
    arguments = command(text, tmp_path / "run", "--mesh", "fsdp=3,ep=2")
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("train: error: ") and result.stderr.count("\n") == 1
    assert "fsdp=3 x ep=2 = 6 with 8 devices" in result.stderr
    assert not (tmp_path / "run").exists()

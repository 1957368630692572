"""Bad options: exit code 2 and one line on stderr with the value, the rule and the remedy."""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from expertmesh.train import checkpoint, cli, job, mesh, rundir
from expertmesh.train.data import Corpus
from expertmesh.train.devices import Cluster, detect_cluster, start
from expertmesh.train.model import LAYER_INPUT
from expertmesh.train.offload import HOST
from expertmesh.train.options import (
    DeviceOptions,
    ModelOptions,
    Options,
    RunOptions,
    TrainingOptions,
    UsageError,
)
from expertmesh.train.rundir import RunFolder

pytestmark = pytest.mark.default_jax

CORPUS = Corpus(np.zeros(9000, np.uint8), np.zeros(1000, np.uint8), source="")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--stepz 3", "'--stepz'; did you mean --steps?"),
        ("--step 3", "'--step'; did you mean --steps?"),
        ("--q 3", "'--q'; see --help"),
        ("words", "'words'; see --help"),
        ("--steps -3", "--steps: must be a whole number of at least 1; got '-3'; give 1 or more"),
        ("--steps 0", "got '0'; give 1 or more"),
        ("--steps 1.5", "got '1.5'; give 1 or more"),
        ("--seed -1", "--seed: must be a whole number of at least 0; got '-1'"),
        ("--seed 4294967296", "--seed: must be below 2^32; got '4294967296'"),
        ("--batch-size many", "got 'many'"),
        ("--grad-accum 0", "--grad-accum: must be a whole number of at least 1; got '0'"),
        (
            "--remat all",
            "one of none, save_8_bits, save_min, recompute, full; got 'all'; give none",
        ),
        ("--optimizer sgd", "one of adamw, muon; got 'sgd'; give adamw"),
        ("--learning-rate 0", "must be a number above 0; got '0'; give a positive number"),
        ("--learning-rate -1", "got '-1'"),
        ("--learning-rate inf", "got 'inf'"),
        ("--learning-rate nan", "got 'nan'"),
        ("--aux-loss -1e-2", "must be a number of at least 0; got '-1e-2'; give 0"),
        ("--capacity-factor x", "got 'x'"),
        ("--capacity-factor 0.5", "a number of at least 1; got '0.5'; leave it out"),
        ("--mesh fsdp", "must be axis=size entries"),
        ("--mesh fsdp=two", "got 'fsdp=two'; write it like fsdp=2,ep=4"),
        ("--mesh fsdp=-2", "must be axis=size entries"),
        ("--mesh fsdp=2,ep=0", "sizes of at least 1; got 'fsdp=2,ep=0'"),
        ("--mesh fsdp=2,,ep=4", "must be axis=size entries"),
        ("--mesh tp=2", "made of the axes fsdp and ep, not 'tp'; got 'tp=2'"),
        ("--mesh ep=2,ep=4", "without a second 'ep'"),
        ("--axis-types manual", "one of explicit, auto; got 'manual'; give explicit"),
        ("--recipe fp8", "one of fp8_delayed, fp8_current, fp8_block, mxfp8, nvfp4; got 'fp8'"),
        ("--dtype float16", "one of auto, float32, bfloat16; got 'float16'"),
        ("--coordinator host", "must be host:port; got 'host'"),
        ("--coordinator host:99999", "must be host:port; got 'host:99999'"),
        ("--data", "--data: expected one argument"),
        ("--data=", "must be a path; got ''"),
        ("--data no/such/file", "got no/such/file: No such file or directory; give an existing"),
    ],
)
def test_one_line_and_exit_code_2(arguments, says, capsys):
    assert cli.main(arguments.split(" ")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("train: error: ") and captured.err.count("\n") == 1
    assert says in captured.err


def test_without_a_dependency(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # an import of it fails
    for module in ("job", "recorder"):
        monkeypatch.delitem(sys.modules, f"{job.__package__}.{module}")
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train: error: tqdm must be installed") and said.count("\n") == 1
    assert "pip install expertmesh-train" in said


def test_every_default_is_what_its_option_reads():
    assert cli.parse([]) == Options()


def test_values_arrive_in_their_group():
    options = cli.parse(["--mesh", " fsdp=2, ep=4", "--top-k=1", "--resume", "--steps", "7"])
    assert dict(options.devices.mesh) == {"fsdp": 2, "ep": 4}
    assert (options.model.top_k, options.run.resume, options.training.steps) == (1, True, 7)


@pytest.mark.parametrize(
    ("entries", "devices", "experts", "expected"),
    [
        ({}, 8, 8, (2, 4)),
        ({}, 4, 8, (1, 4)),
        ({}, 1, 8, (1, 1)),
        ({}, 6, 8, (3, 2)),
        ({}, 8, 6, (4, 2)),
        ({}, 16, 64, (4, 4)),
        ({"ep": 8}, 8, 8, (1, 8)),
        ({"ep": 2}, 8, 8, (4, 2)),
        ({"fsdp": 8}, 8, 8, (8, 1)),
        ({"fsdp": 2, "ep": 2}, 4, 8, (2, 2)),
    ],
)
def test_mesh_sizes(entries, devices, experts, expected):
    assert mesh.mesh_sizes(entries, devices, experts) == expected


@pytest.mark.parametrize(
    ("entries", "experts", "says"),
    [
        ({"fsdp": 3, "ep": 2}, 8, "fsdp=3 x ep=2 = 6 with 8 devices"),
        ({"fsdp": 2, "ep": 2}, 8, "fsdp=2 x ep=2 = 4 with 8 devices"),
        ({"ep": 3}, 9, "with 8 devices"),
        ({"fsdp": 16}, 8, "fsdp=16 x ep=1 = 16 with 8 devices"),
        ({"ep": 4}, 6, "got experts=6, ep=4; give --experts 8"),
    ],
)
def test_meshes_that_do_not_fit(entries, experts, says):
    with pytest.raises(UsageError, match=says):
        mesh.mesh_sizes(entries, 8, experts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 3}, "model-dim=256, heads=3; give --model-dim 258"),
        ({"model_dim": 36, "heads": 4}, "model-dim=36, heads=4; give --model-dim 40"),
        ({"top_k": 9}, "got top-k=9, experts=8; give --top-k 8"),
        ({"capacity_factor": 0.5}, "capacity_factor=0.5"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
    ],
)
def test_models_that_contradict_themselves(changes, says):
    with pytest.raises(UsageError, match=says) as error:
        job.model_config(ModelOptions(**({"dtype": "float32"} | changes)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "devices", "says"),
    [
        ({"model_dim": 252}, {}, "model-dim=252, fsdp=8; give --model-dim 256"),
        ({"transport": "local"}, {"mesh": (("ep", 8),)}, "got ep=8; give --transport auto"),
        ({"experts": 12}, {"shard_exp_on_fsdp": True}, "got experts=12, fsdp=8 x ep=1; leave"),
        ({}, {"shard_exp_on_fsdp": True, "spare_experts": 1}, "num_spare_experts must go with"),
        (
            {"recipe": "fp8_delayed"},
            {"spare_experts": 1},
            "num_spare_experts must go with a recipe",
        ),
    ],
)
def test_models_that_do_not_fit_the_mesh(model, devices, says):
    options = Options(
        model=ModelOptions(**model), devices=DeviceOptions(**({"mesh": (("fsdp", 8),)} | devices))
    )
    with pytest.raises(UsageError, match=says):
        job.plan(options, CORPUS)


def test_batch_that_does_not_fit_the_devices():
    options = Options(training=TrainingOptions(batch_size=12))
    says = "got batch-size=12 with 8 devices, grad-accum=1; give --batch-size 16"
    with pytest.raises(UsageError, match=says):
        job.plan(options, CORPUS)


def resumed(folder, recorded, **training):
    """The batch size on 8 devices of a run that was started with another."""
    was = TrainingOptions(batch_size=recorded)
    rundir.begin(folder, rundir.record(ModelOptions(), was, "digest"))
    run = RunOptions(out=folder.path, resume=True)
    options = Options(training=TrainingOptions(**training), run=run)
    return job.plan(options, CORPUS).options.training.batch_size


def test_resume_keeps_the_batch_size_of_the_run(tmp_path):
    """Unless another is given; it is no longer that of new runs, whatever the number of devices."""
    folder = RunFolder(tmp_path / "run")
    assert resumed(folder, 32) == 32
    assert resumed(folder, 32, grad_accum=2) == 32
    assert resumed(folder, 32, batch_size=16) == 16
    says = "got batch-size=12 of the run that --resume continues with 8 devices.* or give --batch-size 16"
    with pytest.raises(UsageError, match=says):
        resumed(folder, 12)
    assert resumed(folder, "12") == 8, "a damaged record is refused when the run begins"


def test_what_offload_keeps_in_the_host(monkeypatch):
    for remat, kept in (("none", ()), ("full", (LAYER_INPUT,))):
        training = TrainingOptions(remat=remat, offload=True)
        planned = job.plan(Options(training=training), CORPUS)
        assert planned.config.kept_in_host == kept
        without = job.plan(Options(training=TrainingOptions(remat=remat)), CORPUS)
        for one, hosted in ((planned, True), (without, False)):
            places = jax.tree.leaves(one.trainer.shardings.opt_state)
            assert (HOST in {place.memory_kind for place in places}) == hosted
    monkeypatch.setattr(
        job, "unsupported", lambda device: "abacus has no memory of the kind pinned_host"
    )
    with pytest.raises(UsageError, match="got abacus has no .* leave --offload out"):
        job.plan(Options(training=TrainingOptions(offload=True)), CORPUS)


def test_batch_that_does_not_fit_its_microbatches():
    options = Options(training=TrainingOptions(batch_size=32, grad_accum=3))
    says = "got batch-size=32 with 8 devices, grad-accum=3; give --batch-size 48"
    with pytest.raises(UsageError, match=says):
        job.plan(options, CORPUS)
    unset = job.plan(Options(training=TrainingOptions(grad_accum=3)), CORPUS)
    assert unset.options.training.batch_size == 24


@pytest.mark.parametrize(
    ("remat", "of_block", "of_layers"),
    [
        ("none", "save_all", False),
        ("save_8_bits", "save_8_bits", False),
        ("save_min", "save_min", False),
        ("recompute", "recompute", False),
        ("full", "save_all", True),
    ],
)
def test_remat_of_block_and_layers(remat, of_block, of_layers):
    config = job.plan(Options(training=TrainingOptions(remat=remat)), CORPUS).config
    assert (config.moe.remat, config.remat_layers) == (of_block, of_layers)


@pytest.mark.parametrize(
    ("layers", "training", "unrolled"),
    [
        (16, {}, True),
        (17, {}, False),
        (2, {"remat": "recompute"}, True),
        (2, {"remat": "full"}, False),
        (2, {"grad_accum": 2, "batch_size": 16}, False),
    ],
)
def test_few_layers_are_compiled_one_by_one(layers, training, unrolled):
    options = Options(model=ModelOptions(layers=layers), training=TrainingOptions(**training))
    assert job.plan(options, CORPUS).config.unrolled == unrolled


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"HOME": "/"}, None),
        (SLURM, Cluster("slurm", 2)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),  # a batch script outside srun
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, Cluster("ompi", 4)),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, Cluster("mpi4py", 4)),
        ({"KUBERNETES_SERVICE_HOST": "h"}, None),  # a pod of its own
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}, Cluster("k8s", None)),
    ],
)
def test_clusters_by_their_environment(environ, expected):
    assert detect_cluster(environ) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"coordinator": "h:1"}, "no --num-processes and no --process-id"),
        ({"num_processes": 2, "process_id": 0}, "no --coordinator"),
        ({"num_processes": 2}, "no --coordinator and no --process-id"),
        (
            {"coordinator": "h:1", "num_processes": 2, "process_id": 2},
            "process-id=2, num-processes=2; number the processes from 0 to 1",
        ),
    ],
)
def test_clusters_that_cannot_meet(given, says):
    with pytest.raises(UsageError, match=says):
        start(DeviceOptions(**given))


def record(**changes):
    return rundir.record(ModelOptions(**changes), TrainingOptions(), "digest")


def test_resume_without_a_run(tmp_path):
    with pytest.raises(UsageError, match="--resume must find a run in --out; got .*nothing"):
        rundir.check_resumable(RunFolder(tmp_path / "nothing"), record())


def test_resume_with_another_model_or_text(tmp_path):
    folder = RunFolder(tmp_path / "run")
    rundir.begin(folder, record())
    assert rundir.check_resumable(folder, record()) is None
    with pytest.raises(UsageError, match="got --layers 3 instead of 2, --top-k 1 instead of 2"):
        rundir.check_resumable(folder, record(layers=3, top_k=1))
    with pytest.raises(UsageError, match="--resume must keep the data"):
        rundir.check_resumable(folder, record() | {"data": "other"})
    muon = rundir.record(ModelOptions(), TrainingOptions(optimizer="muon"), "digest")
    with pytest.raises(
        UsageError, match="got --optimizer muon instead of adamw; give --optimizer adamw"
    ):
        rundir.check_resumable(folder, muon)
    copies = rundir.record(ModelOptions(), TrainingOptions(), "digest", spare_experts=2)
    assert "--spare-experts 2 instead of 0" in rundir.check_resumable(folder, copies)
    longer = rundir.record(ModelOptions(), TrainingOptions(steps=999), "digest")
    assert "--steps 999 instead of" in rundir.check_resumable(folder, longer)


def test_a_new_run_moves_the_old_one_away(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert rundir.begin(folder, record()) is None
    folder.metrics.write_text("first")
    note = rundir.begin(folder, record())
    assert "run.previous" in note and "deleted" not in note
    assert not folder.metrics.exists()
    assert (tmp_path / "run.previous" / "metrics.csv").read_text() == "first"
    assert "run.previous now" in (note := rundir.begin(folder, record()))
    assert note.endswith("the run that was there before is deleted")
    assert not (tmp_path / "run.previous" / "metrics.csv").exists()


def test_fewer_steps_than_the_checkpoint_has():
    job._check_steps(14, 14)
    with pytest.raises(UsageError, match="--steps must be no less .* got 9, .* step 14; give"):
        job._check_steps(9, 14)


def test_a_folder_is_of_one_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    rundir.begin(folder, record())
    with rundir.held(folder):
        with pytest.raises(UsageError, match="must not use or replace the folder of a run that"):
            rundir.begin(folder, record())
        with pytest.raises(UsageError, match="goes on"), rundir.held(folder):
            pass
    assert "run.previous" in rundir.begin(folder, record())


@pytest.mark.parametrize("killed", [False, True])
def test_a_failed_start_leaves_its_folder_free(tmp_path, monkeypatch, killed):
    """On a full disk nothing is left; a kill leaves a part of the record."""
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(UsageError, match="No space left on device; give another --out"):
            rundir.begin(folder, record())
    assert [file.name for file in folder.path.iterdir()] == ["checkpoints"] and not folder.has_run
    if killed:
        (folder.path / "options.json.part").write_text("{")
    assert rundir.begin(folder, record()) is None
    assert sorted(file.name for file in folder.path.iterdir()) == ["checkpoints", "options.json"]


def test_a_failed_start_keeps_the_run_before_the_last(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    rundir.begin(folder, record())
    folder.metrics.write_text("good")
    real = os.mkdir

    def refused(path, *mode):
        if Path(path) == folder.checkpoints:
            raise OSError(28, "No space left on device")
        real(path, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refused)
        with pytest.raises(UsageError, match="No space left"):
            rundir.begin(folder, record())
    assert rundir.begin(folder, record()) is None
    assert (tmp_path / "run.previous" / "metrics.csv").read_text() == "good"


def test_links_that_lead_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(
        UsageError, match="--out must be a folder that can be written; got .*; give"
    ):
        rundir.begin(RunFolder(tmp_path / "a"), record())


def test_a_link_to_a_run_stays(tmp_path):
    """What it leads to is moved, beside itself; it may lead to a folder that is yet to be made."""
    scratch, folder = tmp_path / "scratch", RunFolder(tmp_path / "runs" / "a")
    folder.path.parent.mkdir()
    folder.path.symlink_to(scratch / "a")
    for _ in range(3):
        rundir.begin(folder, record())
        assert folder.path.readlink() == scratch / "a" and folder.options.is_file()
    assert sorted(path.name for path in scratch.iterdir()) == ["a", "a.previous"]
    assert [path.name for path in folder.path.parent.iterdir()] == ["a"]


def test_a_run_that_goes_on_is_not_replaced(tmp_path):
    """One that was moved away and is resumed there."""
    folder, previous = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run.previous")
    for _ in range(2):
        rundir.begin(folder, record())
    with rundir.held(previous):
        with pytest.raises(UsageError, match="a run that goes on; got .*run.previous; give"):
            rundir.begin(folder, record())
        assert folder.options.is_file() and previous.options.is_file()
    rundir.begin(folder, record())


def test_what_is_no_earlier_run_is_not_removed(tmp_path, monkeypatch):
    folder, kept = RunFolder(tmp_path / "run"), tmp_path / "run.previous" / "thesis.tex"
    rundir.begin(folder, record())
    kept.parent.mkdir()
    kept.write_text("precious")
    with pytest.raises(UsageError, match="got other files there"):
        rundir.begin(folder, record())
    assert kept.read_text() == "precious" and folder.options.is_file()
    monkeypatch.chdir(folder.path)
    with pytest.raises(UsageError, match="must not be the working folder"):
        rundir.begin(RunFolder(Path(".")), record())


@pytest.mark.parametrize("text", ["{}", "[]", '{"model": {}}', "null"])
def test_a_damaged_record_is_refused(tmp_path, text):
    folder = RunFolder(tmp_path / "run")
    rundir.begin(folder, record())
    folder.options.write_text(text)
    with pytest.raises(UsageError, match="without a readable options.json"):
        rundir.check_resumable(folder, record())


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="which holds other files; give another --out"):
        rundir.begin(RunFolder(tmp_path), record())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out must be"):
        rundir.begin(RunFolder(tmp_path / "file" / "run"), record())
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_what_no_memory_holds_is_said_in_one_line(tmp_path, capsys):
    wide = "--model-dim 2000000 --heads 2 --expert-dim 200000 --seq-len 16 --steps 1"
    assert cli.main([*wide.split(), "--out", str(tmp_path / "run")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "a device's memory must hold the state and a step; got " in line
    assert "ut of memory" in line and "--batch-size" in line


TINY = (
    "--steps 3 --layers 1 --model-dim 32 --heads 2 --experts 8 --expert-dim 16 --seq-len 16 "
    "--eval-windows 8 --eval-every 100 --checkpoint-every 2 --log-every 1"
).split()


@pytest.fixture
def tiny(tmp_path):
    """Trains a tiny model into `tmp_path / "run"`, and returns the exit code."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    always = [*TINY, "--data", str(tmp_path / "text"), "--out", str(tmp_path / "run")]
    return lambda *arguments: cli.main([*always, *arguments])


@pytest.mark.parametrize("name", [None, "/runs/x"])
def test_what_no_disk_holds_is_said_in_one_line(tiny, tmp_path, capsys, monkeypatch, name):
    error = OSError(28, "No space left on device", name)
    monkeypatch.setattr(checkpoint, "save", mock.Mock(side_effect=error))
    assert tiny() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: error: the system must let a run write its files; got ")
    assert f"{name or tmp_path / 'run'}: No space left on device; make room" in line
    assert line.endswith("--resume goes on from the last checkpoint")


@pytest.mark.parametrize("error", [OSError("no such library"), BrokenPipeError(32, "Broken pipe")])
def test_other_errors_are_not_those_of_a_disk(tiny, monkeypatch, error):
    monkeypatch.setattr(checkpoint, "save", mock.Mock(side_effect=error))
    with pytest.raises(OSError) as raised:
        tiny()
    assert raised.value is error


def test_without_a_step_left_the_loss_is_known(tiny, tmp_path, capsys):
    """The run was stopped after a step that was not validated, and is resumed with no more steps than that."""
    folder = RunFolder(tmp_path / "run")
    assert tiny() == 0
    whole = json.loads(folder.summary.read_text())["valid_loss"]
    assert tiny("--resume") == 0
    assert json.loads(folder.summary.read_text())["valid_loss"] == whole
    shutil.rmtree(folder.checkpoints / "3")
    assert tiny("--resume", "--steps", "2") == 0
    loss = json.loads(folder.summary.read_text())["valid_loss"]
    assert 5 < loss < 6 and loss != whole
    assert f"validation loss        {loss:.4f} nats per byte" in capsys.readouterr().out

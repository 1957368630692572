"""The examples for two hosts, run as processes here by what Slurm and Kubernetes would set."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from multiprocess_runner import free_port

pytestmark = pytest.mark.usefixtures("kept_programs")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT, MANIFEST = ROOT / "examples/slurm.sbatch", ROOT / "examples/kubernetes.yaml"
LAST_STEP = r"step 2: loss (\d\.\d+), EP 4 over 2 hosts"
# Slurm's launcher, as far as it matters: a process for each task, which knows its number.
SRUN = """#!/usr/bin/env bash
for task in 0 1; do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait $task || status=$?; done
exit $status
"""


def environment(**variables):
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "PYTEST_"))}
    return inherited | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | variables


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.default_jax
@pytest.mark.multiprocess
def test_slurm(tmp_path):
    """The batch script, where `srun` starts a task on each of two nodes."""
    write_program(tmp_path / "bin/srun", SRUN)
    python = f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n'
    write_program(tmp_path / ".venv/bin/python", python)
    job = free_port()  # JAX makes the port of it
    variables = dict(
        SLURM_JOB_ID=str(job),
        SLURM_STEP_NODELIST="localhost",
        SLURM_NTASKS="2",
        SLURM_STEP_NUM_NODES="2",
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    )
    command = ["bash", SCRIPT, ROOT / "examples/hosts.py", "--transport", "two_level"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(LAST_STEP, done.stdout)) == 1  # the first process says it


@pytest.mark.default_jax
@pytest.mark.multiprocess
def test_kubernetes():
    """The container of each pod, as the manifest describes it."""
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    name, port = variables["COORDINATOR"].split(":")
    assert name == f"{job['metadata']['name']}-0.{pod['subdomain']}" and int(port) < 2**16
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["NUM_PODS"]) == 2
    variables["COORDINATOR"] = f"localhost:{free_port()}"
    python, *arguments = container["command"]
    assert python == "python"
    pods = [
        subprocess.Popen(
            [sys.executable, *arguments, "--transport", "ring"],
            cwd=ROOT,
            env=environment(**variables, JOB_COMPLETION_INDEX=str(index)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(spec["completions"])
    ]
    printed = [pod.communicate(timeout=240)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(printed)
    assert re.search(LAST_STEP, printed[0]) and not re.search(LAST_STEP, printed[1])

"""The tutorial runs as users run it, on a small model; what it shows is so, and docs/tutorial.md shows what runs."""

import pathlib
import re
import subprocess
import types

import jax
import pytest

from cases.covering import full
from integration import tutorial_case
from multiprocess_runner import on_gpu

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/tutorial.md"


def figures():
    """How far results differ by docs/tutorial.md: name -> part of the norm; the last is of the quantized forward."""
    found = re.findall(r"^ +differs by (\S+) of the norm: (\S+)$", PAGE.read_text(), re.MULTILINE)
    *bfloat16, (quantized, name) = found
    assert name == "y"
    return {name: float(part) for part, name in bfloat16} | {"8 bits": float(quantized)}


@pytest.fixture(scope="module")
def tutorial():
    return tutorial_case.load()


def test_ours_instead_of_native_on_2_x_2_devices(tutorial, capsys):
    errors = tutorial.main(jax.devices()[:4])
    said = capsys.readouterr().out
    gradients = {f"d.block.{name}" for name in ("gate_kernel", "wi", "wo")}
    assert set(errors["bfloat16"]) == gradients | {"y", "d_x", "d.RMSNorm_0.scale"}
    assert max(errors["bfloat16"].values()) < 1e-2
    assert 1e-3 < errors["fp8_block"]["y"] < 0.1
    assert "{'fsdp': 2, 'ep': 2}; jax" in said and re.search(r"native: [\d.]+ ms", said)
    assert "a device receives at most 32 rows" in said
    found = errors["bfloat16"] | {"8 bits": errors["fp8_block"]["y"]}
    assert figures() == pytest.approx(found, rel=0.1)
    # What docs/tutorial.md reads in the program; there is nothing else between the devices of the first.
    shown = re.findall(r"^ +(\d x .*)$", PAGE.read_text(), re.MULTILINE)
    bfloat16, _, quantized = said.partition("fp8_block: ")
    assert len(shown) == 15 and set(shown[12:]) <= set(re.findall(r"\d x .*", quantized))
    assert sorted(shown[:12]) == sorted(re.findall(r"\d x .*", bfloat16.partition("bfloat16: ")[2]))


@pytest.mark.parametrize("devices", [full(1), full(2), full(3), 8])
def test_on_any_number_of_devices(tutorial, devices, capsys):
    """The model grows where the devices do not divide it; a quantizer's blocks stay on one device."""
    errors = tutorial.main(jax.devices()[:devices])
    assert max(errors["bfloat16"].values()) < 1e-2 and 1e-3 < errors["fp8_block"]["y"] < 0.1
    assert f"{devices} x cpu" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="it needs NVIDIA GPUs")
def test_on_all_gpus(tutorial, capsys):
    """On one, or as 2 x 2; 8 bits with their gradients, whose rounding is that of two products."""
    errors = tutorial.main()
    assert max(errors["bfloat16"].values()) < 1e-2, errors
    assert 1e-3 < errors["fp8_block"]["y"] and max(errors["fp8_block"].values()) < 0.15, errors
    assert set(errors["fp8_block"]) == set(errors["bfloat16"])
    assert re.search(r"bfloat16: [\d.]+ ms, [\d.]+ times as fast", capsys.readouterr().out)


def test_native_runs_where_ours_can_not(tutorial, capsys, monkeypatch):
    class Program:
        def __call__(self, *operands):
            return operands[1]

    monkeypatch.setattr(tutorial, "is_supported", lambda *args: (False, "planted"))
    monkeypatch.setattr(tutorial, "compile_program", lambda *args: (Program(), ""))
    assert tutorial.main(jax.devices()[:1]) == {}
    said = capsys.readouterr().out
    assert "native: " in said and "ours: skipped, planted" in said


@pytest.mark.full
@pytest.mark.multiprocess
def test_over_processes(multiprocess):
    """As under Slurm: each process calls it, and has a part of the devices.

    Over processes XLA:CPU overwrites the operand of a reduce-scatter while it is sent, so that the end of a weight's
    gradient may be wrong, of ours as of native's (jax-ml/jax issue 40830, seen with jax 0.11.2).
    """
    first, second = multiprocess("integration.tutorial_case:run", processes=2, devices=2)
    assert first == second
    d_wi = first["bfloat16"].pop("d.block.wi")
    assert d_wi < (1e-2 if on_gpu() else 0.1)
    assert max(first["bfloat16"].values()) < 1e-2 and first["fp8_block"]["y"] < 0.1


def test_a_time_is_the_median_up_to_the_whole_result(tutorial, monkeypatch):
    """By a clock that stands still but while it is waited for a result: 5 s at first, then 0, 1, 4, ... 361 ms."""
    clock, calls = [0.0], []
    result = {"a": jax.numpy.zeros(1), "b": [jax.numpy.zeros(2)]}
    waits = iter([5.0, *(1e-3 * i**2 for i in range(20))])

    def wait(arrays):
        assert arrays is result
        clock[0] += next(waits)

    def step(x):
        calls.append(x)
        return result

    monkeypatch.setattr(jax, "block_until_ready", wait)
    monkeypatch.setattr(tutorial, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    assert tutorial.milliseconds(step, (3,)) == pytest.approx((81 + 100) / 2)
    assert calls == [3] * 21


def test_the_page_shows_the_program(tutorial):
    """What it includes exists; it leaves out nothing of what is compared and measured."""
    shown = re.findall(r"tutorial.py\n:pyobject: (\w+)", PAGE.read_text())
    assert all(hasattr(tutorial, name) for name in shown) and len(set(shown)) == len(shown)
    wanted = (
        "Layer make_mesh make_operands make_step compare milliseconds choose_transport crossing"
    )
    assert set(wanted.split()) <= set(shown)


def test_the_slurm_script_is_a_script():
    script = ROOT / "examples/slurm.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0

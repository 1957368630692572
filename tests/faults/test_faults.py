"""The planted faults are fit to be planted: `make faults` plants them."""

import collections
import pathlib
import subprocess
import sys

import pytest

from cases.scripts import load_script

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
run = load_script(pathlib.Path(__file__).with_name("run.py"))

FAULTS = run.all_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_can_be_planted(fault, tmp_path):
    assert not fault.problem(ROOT)
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / fault.file).read_text())
    fault.plant(tmp_path)
    if copy.suffix == ".py":
        compile(copy.read_text(), fault.file, "exec")
    # What is planted is not what stood there.
    assert copy.read_text() != (ROOT / fault.file).read_text()


def test_faults_are_in_every_package():
    files = collections.Counter(fault.file.split("/")[1] for fault in FAULTS)
    assert set(files) == {"core", "ep", "flax_moe", "train"} and min(files.values()) >= 4
    assert all(fault.file.startswith("packages/") for fault in FAULTS)
    assert len({fault.broken for fault in FAULTS}) == len(FAULTS)


def test_named_tests_exist():
    nodes = sorted({node for fault in FAULTS for node in fault.tests})
    assert not [node for node in nodes if not (ROOT / node.partition("::")[0]).is_file()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "--assert=plain"]
    result = subprocess.run([*command, *nodes], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_what_can_not_be_planted_is_said(tmp_path):
    row = dict(name="x", broken="B.", file="a.py", new="n", test="t.py")
    assert "file must be" in run.Fault(**row, old="o").problem(tmp_path)
    (tmp_path / "a.py").write_text("one, two, two")
    assert run.Fault(**row, old="one").problem(tmp_path) == ""
    for old, count in (("two", 2), ("three", 0)):
        assert f"got {count} times" in run.Fault(**row, old=old).problem(tmp_path)


def test_a_failed_test_finds_it():
    fault = run.Fault(name="x", broken="B.", file="f", old="o", new="n", test="a.py 'b.py::c[d e]'")
    assert fault.tests == ("a.py", "b.py::c[d e]")
    others = (0, 2, 3, 4, 5, 124, -6)
    assert fault.finds(1) and not any(map(fault.finds, others))
    crash = run.dataclasses.replace(fault, crash=True)
    assert crash.finds(-6) and not any(map(crash.finds, (0, 1, 2, 3, 4, 5, 124)))

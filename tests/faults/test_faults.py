"""The planted faults are fit to be planted: `make faults` plants them."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "faults_run", pathlib.Path(__file__).with_name("run.py")
)
assert _spec and _spec.loader
run = sys.modules["faults_run"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)

FAULTS = run.all_faults()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    target = tmp_path_factory.mktemp("faults") / "tree"
    run.copy_tree(target)
    return target


def test_every_area_has_faults():
    areas = {fault.name.partition("_")[0] for fault in FAULTS}
    assert len(FAULTS) >= 30
    assert len({fault.summary for fault in FAULTS}) == len(FAULTS)
    assert {"specs", "rule", "op", "vjp", "gemm", "permute", "router", "ep", "moe"} <= areas


def test_patches_apply(tree):
    problems = {fault.name: run.apply(fault, tree, check=True) for fault in FAULTS}
    assert not {name: problem for name, problem in problems.items() if problem}


def test_patches_change_the_library_only():
    for fault in FAULTS:
        changed = {
            line.split()[1] for line in fault.path.read_text().splitlines() if line[:4] == "+++ "
        }
        assert changed and all(path.startswith("b/packages/") for path in changed), fault.name


def test_named_tests_exist():
    nodes = sorted({arg for fault in FAULTS for arg in fault.tests if arg.startswith("tests/")})
    files = {node.partition("::")[0] for node in nodes}
    assert not [file for file in files if not (ROOT / file).is_file()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "--assert=plain"]
    result = subprocess.run([*command, *nodes], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_headers_say_what_and_where(tmp_path):
    path = tmp_path / "x.patch"
    path.write_text(
        "Broken.\nTest: tests/a.py::test_b -k 'c and d'\n\n--- a/p\n+++ b/p\n@@ -1 +1 @@\n"
    )
    fault = run.read_fault(path)
    assert (fault.summary, fault.tests) == ("Broken.", ("tests/a.py::test_b", "-k", "c and d"))
    assert fault.selects and fault.finds(1) and not any(fault.finds(s) for s in (0, 2, 3, 4, 5, -6))
    path.write_text("Broken.\n\n--- a/p\n+++ b/p\n")
    with pytest.raises(ValueError, match="Test: "):
        run.read_fault(path)

"""The mutants of `make mutants`: what is changed, what is left alone, what a run keeps and says."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

from cases.scripts import load_script

pytestmark = pytest.mark.default_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
run = load_script(pathlib.Path(__file__).with_name("run.py"))


def changed(source):
    """Each mutant's text, as Python prints it."""
    return {ast.unparse(ast.parse(mutant.text)) for mutant in run.mutants(source)}


@pytest.mark.parametrize(
    "source, want",
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a is b", {"x = a is not b"}),
        ("x = a and b", {"x = a", "x = b"}),
        ("x = a or b or c", {"x = b or c", "x = a or c", "x = a or b"}),
        ("x = not a", {"x = a"}),
        ("x = a + 3", {"x = a - 3", "x = a + 4"}),
        ("x = a // b * 2.0", {"x = a // b / 2.0", "x = a * b * 2.0", "x = a // b * 4.0"}),
        ("x = a if c else b", {"x = a", "x = b"}),
        ("import jnp\nx = jnp.where(c, a, b)", {"import jnp\nx = a", "import jnp\nx = b"}),
        ("import jnp\nx = jnp.exp(a)", {"import jnp\nx = a"}),
        ("x = a.astype(d)", {"x = a"}),
        ("x = f(a, b, k=c)", {"x = a", "x = f(a, b)"}),
        ("x = zip(a, b, strict=True)", set()),
        ("x = len(a), Value(b)", set()),
        ("check(a, 1)", {"pass", "check(a, 2)"}),
        ("if a:\n    f = b", {"if not a:\n    f = b"}),
        ("def f(a):\n    if a:\n        return b", {"def f(a):\n    if False:\n        return b"}),
        ("x: int | None = None", set()),
        ("Alias = int | None", set()),
        ("x = isinstance(a, str | tuple)", set()),
        ("@decorator(1)\ndef f(a: int = 1) -> 1:\n    raise E(f'{a + 1}', a + 1)", 1),
    ],
)
def test_what_is_changed(source, want):
    found = changed(source)
    assert len(found) == want if isinstance(want, int) else found == want


def test_text_around_a_change_stays():
    source = "x = 'é'; y = (\n    a  # first\n    + b\n)  # end\n"
    (mutant,) = run.mutants(source)
    assert mutant.text == "x = 'é'; y = (\n    (a - b)\n)  # end\n"
    assert mutant.line == 2
    assert mutant.diff(source) == "-    a  # first\n-    + b\n+    (a - b)"


def test_names_are_unique_and_do_not_depend_on_what_is_elsewhere():
    source = "def f(a):\n    return a + a, a + a\n"
    names = [mutant.name for mutant in run.mutants(source)]
    assert names == ["f: a + a -> a - a", "f: a + a -> a - a (2)"]
    assert names == [mutant.name for mutant in run.mutants("x = y\n\n" + source)]


def test_mutants_of_a_module_compile_and_differ():
    source = run.text_of("core/specs.py")
    texts = [mutant.text for mutant in run.mutants(source)]
    assert len(texts) > 50 and source not in texts
    for text in texts:
        compile(text, "specs.py", "exec")


def test_the_table_names_modules_and_tests_that_exist():
    for module in run.table():
        assert run.text_of(module)
    nodes = sorted({node for row in run.table().values() for node in row["tests"]})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "--assert=plain"]
    result = subprocess.run([*command, *nodes], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_survivor_has_a_module_and_a_reason():
    """Whether it still exists and survives, `make mutants` says: a refactoring need not mend the list."""
    for (module, name), reason in run.reasons().items():
        assert module in run.table() and name.count(": ") and len(reason) > 10


def test_results_are_kept_while_the_module_is_the_same(tmp_path, monkeypatch):
    source = "def f(a):\n    return a + 1\n"
    monkeypatch.setattr(run, "text_of", lambda module: source)
    first, second = run.mutants(source)
    results = run.Results(tmp_path / "kept")
    results.add("core/x.py", first, run.KILLED)
    results.add("core/x.py", second, run.SURVIVED)
    again = run.Results(tmp_path / "kept")
    assert again.of("core/x.py") == {first.name: run.KILLED, second.name: run.SURVIVED}
    source += "\n"
    assert run.Results(tmp_path / "kept").of("core/x.py") == {}


def test_the_report_names_survivors_without_a_reason(tmp_path, monkeypatch, capsys):
    source = "def f(a):\n    return a + 1, a < 2\n"
    monkeypatch.setattr(run, "text_of", lambda module: source)
    results = run.Results(tmp_path)
    names = {mutant.name: mutant for mutant in run.mutants(source)}
    for name, end in [
        ("f: a + 1 -> a - 1", run.SURVIVED),
        ("f: a < 2 -> a <= 2", run.SURVIVED),
        ("f: 1 -> 2", f"{run.KILLED}: 2"),
    ]:
        results.add("core/x.py", names[name], end)
    reasons = {
        ("core/x.py", "f: a < 2 -> a <= 2"): "equivalent",
        ("core/x.py", "f: 1 -> 2"): "killed by now",
    }
    monkeypatch.setattr(run, "reasons", lambda: reasons)
    assert run.report(["core/x.py"], results) == 1
    said = capsys.readouterr().out
    assert "4 mutants, 1 killed, 1 may survive, 1 survive without a reason, 1 not run" in said
    assert "core/x.py:2: f: a + 1 -> a - 1\n-    return a + 1, a < 2\n+    return (a - 1)" in said
    assert "no such survivor: f: 1 -> 2" in said
    assert json.loads((tmp_path / "core.x.json").read_text())["mutants"]["f: 1 -> 2"] == "killed: 2"

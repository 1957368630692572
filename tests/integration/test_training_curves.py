"""`make numerics`: what it runs, what it keeps of it, when it fails."""

import json
from pathlib import Path

import pytest

from cases.scripts import load_script

pytestmark = pytest.mark.default_jax

DOCS = Path(__file__).parents[2] / "docs"
TINY = (
    "--layers 1 --model-dim 32 --heads 2 --experts 4 --expert-dim 16 --seq-len 16 "
    "--eval-windows 8 --eval-every 2 --checkpoint-every 1 --log-every 1 --cpu-devices 1"
).split()


@pytest.fixture(scope="module")
def curves():
    return load_script(DOCS / "training_curves.py")


def result(*valid_losses, data="text", steps=20):
    return {
        "settings": {"steps": steps, "arguments": []},
        "data": data,
        "valid_loss": {str(10 * (i + 1)): loss for i, loss in enumerate(valid_losses)},
        "train_loss": [3.0, 2.0],
    }


def results(**last):
    """Runs of two seeds whose last losses are 2 and 4 for bfloat16, and as given for recipes."""
    last = {"bfloat16": (2.0, 4.0), **last}
    return {f"{name}-{i}": result(5.0, x) for name, xs in last.items() for i, x in enumerate(xs)}


def test_differences_are_of_means_over_seeds(curves, capsys):
    rows = curves.compare(results(mxfp8=(2.02, 4.03), fp8_block=(1.9, 4.03), nvfp4=(3.0, 4.0)))
    assert [row.recipe for row in rows] == ["bfloat16", "fp8_block", "mxfp8", "nvfp4"]
    found = {row.recipe: row.difference for row in rows}
    assert found == pytest.approx(
        {"bfloat16": 0, "fp8_block": -0.07 / 6, "mxfp8": 0.05 / 6, "nvfp4": 1 / 6}
    )
    assert "not yet: fp8_delayed\nnot yet: fp8_current\n" in capsys.readouterr().out
    # 1 % either way; of four bits nothing is asked.
    assert {row.recipe for row in rows if not row.is_within} == {"fp8_block"}


def test_a_recipe_is_compared_over_its_own_seeds(curves):
    (plain, mxfp8) = curves.compare(
        results() | {"mxfp8-1": result(5.0, 4.04), "mxfp8-7": result(9.0)}
    )
    assert plain.seeds == (0, 1) and mxfp8.seeds == (1,)
    assert mxfp8.difference == pytest.approx(0.01)


def test_runs_that_cannot_be_compared(curves):
    with pytest.raises(ValueError, match="same settings and text"):
        curves.compare(results() | {"mxfp8-0": result(1.0, data="another")})
    with pytest.raises(ValueError, match="same settings and text"):
        curves.compare(results() | {"mxfp8-0": result(1.0, steps=30)})
    with pytest.raises(ValueError, match="there must be runs of bfloat16; got .*mxfp8-0"):
        curves.compare({"mxfp8-0": result(1.0)})


@pytest.mark.parametrize("loss, status", [(2.01, 0), (2.2, 1)])
def test_report(curves, tmp_path, loss, status, capsys):
    page = tmp_path / "numerics.md"
    page.write_text("before\n<!-- docs/training_curves.py -->\nold\n<!-- end -->\nafter\n")
    assert curves.report(results(fp8_delayed=(loss, 4.0)), tmp_path) == status
    text = page.read_text()
    assert text.startswith("before\n<!-- docs/training_curves.py -->\n\n| | mean |")
    assert text.endswith("(numerics.png)\n\n<!-- end -->\nafter\n") and "old" not in text
    mean = (loss + 4) / 2
    change = f"{100 * (mean / 3 - 1):+.2f} %, 2 seeds"
    assert f"| fp8_delayed | {mean:.4f} | {change} | {loss:.4f}, 4.0000 |" in text
    assert (tmp_path / "numerics.png").read_bytes().startswith(b"\x89PNG")
    assert ("more than 1 %" in capsys.readouterr().out) == bool(status)
    page.write_text("nowhere to write\n")
    with pytest.raises(ValueError, match="must have the line"):
        curves.report(results(), tmp_path)


@pytest.mark.full
def test_runs_are_resumed_and_kept(curves, tmp_path):
    """A killed run goes on; a finished one is not run again."""
    text = tmp_path / "text"
    text.write_bytes(Path(__file__).read_bytes())
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    docs.mkdir()

    def train(*arguments):
        options = curves.parse(
            ["--recipes", "bfloat16", "--seeds", "1", "--runs", str(runs), "--docs", str(docs)]
            + [*arguments]
            + ["--", *TINY, "--data", str(text)]
        )
        found = curves.Results(docs / "numerics.json")
        curves.train_missing(options, found)
        return json.loads((docs / "numerics.json").read_text())

    first = train("--steps", "4")
    assert list(first) == ["bfloat16-1"]
    assert list(first["bfloat16-1"]["valid_loss"]) == ["2", "4"]
    assert len(first["bfloat16-1"]["train_loss"]) == 1
    # As if it had been killed: a record of the same run, and no finished checkpoint of the last steps.
    (docs / "numerics.json").unlink()
    for name in ("4", "3"):
        (runs / "bfloat16-1" / "checkpoints" / name / "manifest.json").unlink()
    assert train("--steps", "4") == first
    log = runs / "bfloat16-1.log"
    assert "resuming after step 2" in log.read_text()
    log.unlink()
    assert train("--steps", "4") == first and not log.exists()


def test_a_run_that_fails_is_named(curves, tmp_path):
    options = curves.parse(
        ["--recipes", "mxfp8", "--runs", str(tmp_path), "--docs", str(tmp_path), "--seeds", "3"]
        + ["--", "--data", "nothing", "--stepz"]
    )
    with pytest.raises(RuntimeError, match="mxfp8-3 ended with status 2; see .*mxfp8-3.log"):
        curves.train_missing(options, curves.Results(tmp_path / "numerics.json"))
    assert "got '--stepz'" in (tmp_path / "mxfp8-3.log").read_text()


def test_commands(curves):
    options = curves.parse(["--steps", "7", "--", "--cpu-devices", "4"])
    assert len(options.recipes) == 9 and options.seeds == [0, 1, 2]
    plain = curves.command(curves.Run("bfloat16", 2), Path("x"), options, resume=False)
    assert (
        plain[1:]
        == (
            "-m expertmesh.train --dtype bfloat16 --steps 7 --seed 2 --out x --cpu-devices 4"
        ).split()
    )
    other = curves.command(curves.Run("mxfp8", 0), Path("x"), options, resume=True)
    assert (
        other[3:]
        == (
            "--dtype bfloat16 --steps 7 --seed 0 --out x --recipe mxfp8 --resume --cpu-devices 4"
        ).split()
    )
    for name, chosen in [("fp8_block", "--recipe fp8_block "), ("bfloat16", "")]:
        kept = curves.Run(f"{name}+save_8_bits", 0)
        text = " ".join(curves.command(kept, Path("x"), options, resume=False))
        assert f"--out x {chosen}--remat save_8_bits --cpu-devices 4" in text


def test_cores_are_shared_out(curves):
    shares = curves.shares_of_cores(2)
    first, second = shares.get(), shares.get()
    assert shares.empty() and not (first or set()) & (second or set())

"""Metrics: the CSV, its cut at a step, and the shares of the experts."""

import csv
import os
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from expertmesh.train import job, metrics
from expertmesh.train.options import TrainingError
from expertmesh.train.recorder import Recorder
from expertmesh.train.step import StepMetrics

pytestmark = pytest.mark.default_jax

NAMES = metrics.header(2, 2)


def step_metrics(loss, rows, grad_norm=3.0, dropped=4):
    return StepMetrics(
        loss=jnp.float32(loss),
        aux_loss=np.float32(0.1),
        z_loss=np.float32(0.2),
        grad_norm=np.float32(grad_norm),
        num_dropped=np.int32(dropped),
        tokens_per_expert=np.array(rows, np.int32),
        entropy=np.array([0.5, 0.25], np.float32),
    )


def write_run(path, start, steps):
    recorder = Recorder(path, NAMES, start=start, steps=9, tokens=8, log_every=2)
    with recorder:
        for step in range(start + 1, steps + 1):
            valid = step / 10 if step % 3 == 0 else None
            recorder.add(step, step_metrics(np.float32(1) / step, [[step, 1], [2, 2]]), valid)
        recorder.flush()


def test_rows_keep_every_digit_and_their_order(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    write_run(path, 0, 7)
    rows = list(csv.DictReader(path.open()))
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [np.float32(r["loss"]) for r in rows] == [np.float32(1) / s for s in range(1, 8)]
    assert [r["valid_loss"] for r in rows] == ["", "", "0.3", "", "", "0.6", ""]
    assert rows[4]["rows_l0_e0"] == "5" and rows[4]["dropped"] == "4"
    assert rows[4]["entropy_l0"] == "0.5" and rows[4]["entropy_l1"] == "0.25"
    assert float(rows[4]["imbalance"]) == pytest.approx(5 / 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("step 7/9: loss 0.143, ") and "imbalance 1.75" in lines[-1]


def test_the_loop_runs_ahead_by_a_few_steps_only(tmp_path):
    """Whatever `log_every` is: XLA:CPU hangs where more than 32 programs wait. The first step is waited for: it is
    compiled, which is not to count as its speed.
    """
    done = []

    class Loss:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            done.append(self.step)

    recorder = Recorder(tmp_path / "m.csv", NAMES, start=0, steps=99, tokens=8, log_every=50)
    with recorder:
        for step in range(1, 31):
            recorder.add(step, step_metrics(0, [[1, 1]] * 2)._replace(loss=Loss(step)), None)
            assert done == [1, *range(1, step - 7)]


def test_a_cut_run_continues_as_if_it_was_not(tmp_path):
    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    write_run(whole, 0, 7)
    write_run(cut, 0, 6)
    cut.write_text(cut.read_text() + "7,0.14285")  # torn
    assert metrics.keep_until(cut, 7).startswith("cut.csv lacks 1 of 7 steps")
    assert metrics.keep_until(cut, 4) is None
    write_run(cut, 4, 7)

    def without_speed(path):
        return [
            {k: v for k, v in r.items() if k != "tokens_per_second"}
            for r in csv.DictReader(path.open())
        ]

    assert without_speed(cut) == without_speed(whole)


def test_speed_is_of_steps(tmp_path, monkeypatch):
    """Of those that are done, when they are written or not; neither the first nor what is done apart counts."""
    now, done = [0.0], [0]

    class Loss(float):
        def __new__(cls, step):
            return super().__new__(cls, 1.0)

        def __init__(self, step):
            self.step = step

        def is_ready(self):
            return self.step <= done[0]

        def block_until_ready(self):
            finish(self.step)

    def finish(step):
        for _ in range(done[0], step):
            now[0] += 100.0 if done[0] == 0 else 2.0  # the first is compiled
            done[0] += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("jax.device_get", lambda tree: (finish(seen[-1] - 9), tree)[1])
    path, seen = tmp_path / "metrics.csv", []
    with Recorder(path, NAMES, start=0, steps=99, tokens=8, log_every=10) as recorder:
        for step in range(1, 41):
            seen.append(step)
            current = step_metrics(0, [[1, 1]] * 2)._replace(loss=Loss(step))
            if step % 15 == 0:
                with recorder.apart(current):
                    now[0] += 1000.0  # a validation
            recorder.add(step, current, None)
        seen.append(step + 9)
        recorder.flush()
    columns = metrics.read_columns(path)
    assert columns["tokens_per_second"].tolist() == [4.0] * 40  # 8 tokens in 2 s
    assert metrics.median_speed(columns) == 4.0


def test_one_step_has_no_speed(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    write_run(path, 0, 1)
    columns = metrics.read_columns(path)
    assert np.isnan(columns["tokens_per_second"]).all() and metrics.median_speed(columns) is None
    assert "tokens/s" not in capsys.readouterr().out


def test_mfu_is_shown_where_it_is_known(tmp_path, capsys):
    recorder = Recorder(
        tmp_path / "m.csv", NAMES, start=0, steps=3, tokens=8, log_every=1, mfu=lambda speed: 0.125
    )
    with recorder:
        for step in (1, 2, 3):
            recorder.add(step, step_metrics(1, [[1, 1]] * 2), None)
        recorder.flush()
    assert "tokens/s, MFU 12.5 %, imbalance" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("loss, grad_norm", [(np.nan, 1.0), (1.0, np.inf)])
def test_what_is_not_finite_ends_the_run(tmp_path, loss, grad_norm):
    """Its rows are on disk; the state after it is not to be kept."""
    path = tmp_path / "metrics.csv"
    with Recorder(path, NAMES, start=0, steps=9, tokens=8, log_every=9) as recorder:
        for step in (1, 2, 3):
            broken = dict(loss=loss, grad_norm=grad_norm) if step == 2 else dict(loss=1.0)
            recorder.add(step, step_metrics(rows=[[1, 1]] * 2, **broken), None)
        with pytest.raises(TrainingError, match=f"loss={loss}, grad_norm={grad_norm} in step 2"):
            recorder.flush()
    assert len(metrics.read_columns(path)["step"]) == 3


@pytest.mark.parametrize("stalled", [True, False])
def test_a_stall_is_named_as_the_reason(tmp_path, monkeypatch, stalled):
    def raise_stall():
        if stalled:
            raise RuntimeError("planted")

    monkeypatch.setattr(job, "raise_stall", raise_stall)
    with Recorder(tmp_path / "m.csv", NAMES, start=0, steps=9, tokens=8, log_every=9) as recorder:
        recorder.add(1, step_metrics(np.nan, [[1, 1]] * 2), None)
        with pytest.raises(TrainingError, match="must be finite") as error:
            job._flush(recorder)
    assert str(error.value).endswith("; planted") == stalled


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    path = tmp_path / "metrics.csv"
    with pytest.raises(OSError, match="No space left on device: '.*/metrics.csv'"):
        write_run(path, 0, 3)
    with pytest.raises(OSError, match="No space left on device: '.*/metrics.csv'"):
        metrics.keep_until(path, 2)


def test_dropped_choices_are_told_once(tmp_path, capsys):
    with Recorder(tmp_path / "m.csv", NAMES, start=0, steps=9, tokens=8, log_every=2) as recorder:
        for step in range(1, 9):
            dropped = {3: 5, 4: 10, 7: 20}.get(step, 0)
            recorder.add(step, step_metrics(1, [[30, 20]] * 2, dropped=dropped), None)
        recorder.flush()
    alarms = [line for line in capsys.readouterr().out.splitlines() if "alarm" in line]
    assert len(alarms) == 1 and "step 4 dropped 10 of 100 choices, 10.0 %" in alarms[0]


def test_cut_to_nothing(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics.keep_until(path, 3)
    write_run(path, 0, 2)
    metrics.keep_until(path, 0)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "\n", "step,loss\n", "step,loss\nab,1.0\n3", "3,1.0\n"])
def test_without_a_whole_row_the_file_begins_anew(tmp_path, text):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    assert metrics.keep_until(path, 3).startswith("metrics.csv lacks 3 of 3 steps")
    assert not path.exists()
    write_run(path, 3, 5)
    assert metrics.read_columns(path)["step"].tolist() == [4, 5]


@pytest.mark.parametrize("tail", [b"\xff\xfe", b"\0" * 40, b'"\r\r\xff"\n', b"5,,\xff"])
def test_bytes_after_the_rows_are_cut(tmp_path, tail):
    """As a power loss leaves them."""
    path = tmp_path / "metrics.csv"
    write_run(path, 0, 4)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert metrics.read_columns(path)["step"].tolist() == [1, 2, 3, 4]
    assert metrics.keep_until(path, 5).startswith("metrics.csv lacks 1 of 5 steps")
    assert path.read_bytes() == whole


@pytest.mark.parametrize("end", [b"", b"\xff\n", b"\0\n"])
def test_a_row_whose_last_number_is_torn_is_cut(tmp_path, end):
    path = tmp_path / "metrics.csv"
    write_run(path, 0, 4)
    path.write_bytes(path.read_bytes()[:-1] + end)
    assert metrics.keep_until(path, 4).startswith("metrics.csv lacks 1 of 4 steps")
    assert metrics.read_columns(path)["step"].tolist() == [1, 2, 3]


def test_no_rows_no_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n")
    with pytest.raises(ValueError, match=r"metrics.csv must have a row for a step; got none"):
        metrics.read_columns(path)


def test_shares_and_their_smallest(tmp_path):
    path = tmp_path / "metrics.csv"
    write_run(path, 0, 8)
    columns = metrics.read_columns(path)
    assert np.isnan(columns["valid_loss"][0]) and columns["valid_loss"][5] == 0.6
    shares = metrics.expert_shares(columns, 2, 2)
    assert shares[3].tolist() == [[0.8, 0.2], [0.5, 0.5]]
    share, layer, expert, steps = metrics.smallest_share(shares)
    assert (layer, expert, steps) == (0, 1, 2)  # the last quarter: steps 7 and 8
    assert share == pytest.approx((1 / 8 + 1 / 9) / 2)

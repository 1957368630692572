"""The page of a run: what it says, that it stands alone, and what is said of a folder that is no run."""

import html.parser
import json
import xml.etree.ElementTree

import numpy as np
import pytest

from expertmesh import report
from expertmesh.report.page import numbers, page
from expertmesh.report.run import binned, read, sizes
from expertmesh.train import metrics

pytestmark = pytest.mark.default_jax

LAYERS, EXPERTS, STEPS = 2, 3, 8


def cells(step):
    """Layer 0 is even; in layer 1 expert 2 has a tenth of its rows."""
    rows = [[10, 10, 10], [12, 15, 3]]
    fixed = {"step": step, "loss": 2.0 - step / 8, "aux_loss": 0.1, "z_loss": 0.0, "grad_norm": 1}
    fixed |= {"dropped": 3 if step == 2 else 0, "imbalance": 1.5}
    fixed |= {"tokens_per_second": "" if step == 1 else 1000.0 * step}
    fixed |= {"valid_loss": 1.25 if step == 6 else ""}
    fixed |= {f"entropy_l{i}": i + 0.5 for i in range(LAYERS)}
    return fixed | {f"rows_l{i}_e{j}": rows[i][j] for i in range(LAYERS) for j in range(EXPERTS)}


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "a<run>"
    run.mkdir()
    names = metrics.header(LAYERS, EXPERTS)
    lines = [",".join(str(cells(step)[name]) for name in names) for step in range(1, STEPS + 1)]
    (run / "metrics.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    (run / "options.json").write_text(json.dumps({"model": {"experts": EXPERTS}, "data": "<x>"}))
    return run


@pytest.fixture
def finished(folder):
    summary = {
        "exchange_bytes": {"dispatch": 3_000_000, "backward_combine": 12_500_000},
        "phases_ms": {"route": 0.25, "experts": 7.125},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Reader(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.addresses, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href") and not value.startswith(("#", "data:")):
                self.addresses.append(value)


def test_numbers_are_those_of_the_csv(folder):
    found = numbers(read(folder))
    assert found["steps"] == "8" and found["training loss, nats per byte"] == "1.000"
    assert found["validation loss"] == "1.250" and found["tokens per second"] == "5,000"
    assert found["choices dropped"] == f"3 ({3 / (60 * STEPS):.2%})"
    assert found["smallest share, last 2 steps"] == "0.100 (layer 1, expert 2)"
    assert found["even share"] == "0.333"


def test_the_page_stands_alone(folder):
    """No address of another file, no id twice, and what comes from files is escaped."""
    text = page(read(folder))
    found = Reader(text)
    assert found.addresses == [] and len(found.ids) == len(set(found.ids))
    assert "a&lt;run&gt;" in text and "<run>" not in text and "&lt;x&gt;" in text
    for drawing in text.split("<figure>")[1:]:
        xml.etree.ElementTree.fromstring(drawing.partition("</figure>")[0])
    titles = ["Loss", "Expert load", "Router entropy", "Imbalance", "Dropped choices", "Speed"]
    assert all(f"<h2>{title}</h2>" in text for title in titles)
    assert "model.experts" in text


def test_a_finished_run_has_phases_and_bytes(finished):
    text = page(read(finished))
    for title in ("Phases", "Exchanges"):
        assert f"<h2>{title}</h2>" in text
    assert "phases_ms.experts</th><td>7.125<" in text
    assert "exchange_bytes.backward_combine</th><td>12500000<" in text
    assert read(finished).phases["experts"] == 7.125


def test_one_device_sends_nothing_and_without_the_option_there_are_no_phases(folder):
    (folder / "summary.json").write_text(
        json.dumps({"exchange_bytes": {"dispatch": 0, "combine": 0}, "phases_ms": {}})
    )
    text = page(read(folder))
    assert "<h2>Phases</h2>" not in text and "<h2>Exchanges</h2>" not in text


def test_the_command_writes_the_page(folder, capsys):
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == page(read(folder))
    other = folder / "other.html"
    assert report.main([str(folder), "--out", str(other)]) == 0 and other.exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path, folder, capsys):
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "RUN must be the folder of a run" in said and "options.json" in said
    (folder / "metrics.csv").write_text(",".join(metrics.header(LAYERS, EXPERTS)) + "\n")
    assert report.main([str(folder)]) == 2
    capsys.readouterr()
    for names, words in (
        ("step,loss", "such as rows_l0_e0; got step,"),
        ("step,rows_l0_e0", "the columns of a run; got no loss"),
    ):
        (folder / "metrics.csv").write_text(f"{names}\n1,2.5\n")
        assert report.main([str(folder)]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert report.main([str(tmp_path / "none"), "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", ["options.json", "summary.json"])
@pytest.mark.parametrize("text", ["[]", "x", "3"])
def test_a_damaged_record_is_said(folder, capsys, name, text):
    (folder / name).write_text(text)
    assert report.main([str(folder)]) == 2
    assert "RUN must be the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["exchange_bytes", "phases_ms"])
@pytest.mark.parametrize("value", [[], None, 3, "x", {"combine": "x"}])
def test_sizes_that_are_no_numbers_are_said(folder, capsys, key, value):
    (folder / "summary.json").write_text(json.dumps({key: value}))
    assert report.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"summary.json must hold a mapping of numbers as {key}; got {value!r}; give" in said
    assert said.count("\n") == 1


def test_a_torn_row_is_left_out(folder):
    whole = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(whole + "garbage")
    assert len(read(folder).columns["step"]) == whole.count("\n") - 1, "the header is no step"


def test_a_page_that_cannot_be_written_is_said(folder, capsys):
    assert report.main([str(folder), "--out", str(folder)]) == 2
    assert "--out must be a file that can be written" in capsys.readouterr().err


def test_sizes_and_bins():
    columns = dict.fromkeys(metrics.header(3, 11), np.zeros(1))
    assert sizes(columns) == (3, 11)
    values = np.arange(10.0)[:, None]
    np.testing.assert_array_equal(binned(values, 5)[:, 0], [0.5, 2.5, 4.5, 6.5, 8.5])
    np.testing.assert_array_equal(binned(values, 99), values)

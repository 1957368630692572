"""The corpus against files written here, and batches against slices taken one by one."""

import collections
import math
import os
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from expertmesh.train import data, order1, rundir
from expertmesh.train.checkpoint import part_of
from expertmesh.train.options import ModelOptions, TrainingOptions, UsageError
from expertmesh.train.rundir import RunFolder

pytestmark = pytest.mark.default_jax


def write(folder: Path, name: str, text: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def test_folder_is_split_by_file(tmp_path):
    for i in range(23):
        write(tmp_path, f"{i % 3}/{i:02d}.txt", bytes([i]) * 50)
    write(tmp_path, "empty.txt", b"")
    write(tmp_path, ".hidden", b"\xff" * 50)
    corpus = data.load_corpus(tmp_path, seq_len=8)
    names = sorted((f"{i % 3}/{i:02d}.txt", i) for i in range(23))
    held_out = [names[9][1], names[19][1]]
    assert list(corpus.valid) == [i for i in held_out for _ in range(50)]
    assert list(corpus.train) == [i for _, i in names if i not in held_out for _ in range(50)]


def test_runs_are_no_text(tmp_path):
    """Also in `.previous`, and before their first checkpoint; text may have options of its own."""
    for name in ("a", "b/options.json"):
        write(tmp_path, name, name.encode() * 9)
    alone = data.load_corpus(tmp_path, seq_len=8).fingerprint
    folder = RunFolder(tmp_path / "runs" / "x")
    record = rundir.record(ModelOptions(), TrainingOptions(), alone)
    for step in range(3):
        rundir.begin(folder, record)
        if step:
            write(folder.checkpoints, f"{step}/state/d/0", b"weights")
        assert data.load_corpus(tmp_path, seq_len=8).fingerprint == alone
    folder.options.rename(part_of(folder.options))  # as a kill leaves it
    assert data.load_corpus(tmp_path, seq_len=8).fingerprint == alone
    assert sorted(path.name for path in folder.path.parent.iterdir()) == ["x", "x.previous"]


def test_few_files_give_their_last_tenth(tmp_path):
    for name in "abc":
        write(tmp_path, name, name.encode() * 40)
    corpus = data.load_corpus(tmp_path, seq_len=8)
    assert bytes(corpus.train) == b"a" * 40 + b"b" * 40 + b"c" * 28
    assert bytes(corpus.valid) == b"c" * 12
    assert corpus.source == f"{tmp_path}: 3 files"


def test_one_file_gives_its_last_tenth(tmp_path):
    text = bytes(range(200)) * 2
    write(tmp_path, "text", text)
    corpus = data.load_corpus(tmp_path / "text", seq_len=8)
    assert bytes(corpus.train) == text[:360]
    assert bytes(corpus.valid) == text[360:]
    assert corpus.source == f"{tmp_path / 'text'}: 1 file"


def test_bytes_are_capped(tmp_path, monkeypatch):
    """It is said, and of the bytes that are read a tenth is held out."""
    monkeypatch.setattr(data, "MAX_BYTES", 1 << 20)
    for name in "abc":
        write(tmp_path, name, name.encode() * (5 << 17))
    corpus = data.load_corpus(tmp_path, seq_len=8)
    assert bytes(corpus.train) + bytes(corpus.valid) == b"a" * (5 << 17) + b"b" * (3 << 17)
    assert len(corpus.valid) == (1 << 20) // 10
    assert corpus.source == f"{tmp_path}: the first 1 MiB of 3 files"


@pytest.mark.parametrize("more", [b"", b"b"])
def test_as_many_bytes_as_are_read_are_not_cut(tmp_path, monkeypatch, more):
    monkeypatch.setattr(data, "MAX_BYTES", 1 << 20)
    write(tmp_path, "a", b"a" * (1 << 20))
    write(tmp_path, "b", more)
    corpus = data.load_corpus(tmp_path, seq_len=8)
    assert bytes(corpus.train) + bytes(corpus.valid) == b"a" * (1 << 20)
    assert corpus.source.endswith("the first 1 MiB of 2 files" if more else ": 1 file")


def test_standard_library_without_its_tests():
    corpus = data.load_corpus(None, seq_len=128)
    text = bytes(corpus.train) + bytes(corpus.valid)
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "json/decoder.py"):
        assert (stdlib / name).read_bytes() in text
    for name in ("test/support/__init__.py", "ctypes/test/__init__.py", "unittest/test/dummy.py"):
        content = (stdlib / name).read_bytes() if (stdlib / name).exists() else b""
        assert len(content) < 200 or content not in text
    assert 0.05 < len(corpus.valid) / len(text) < 0.2
    assert data.load_corpus(None, seq_len=64).fingerprint == corpus.fingerprint


def test_fingerprint_tells_texts_and_splits_apart():
    def fingerprint(train, valid):
        as_bytes = (np.frombuffer(part, np.uint8) for part in (train, valid))
        return data.Corpus(*as_bytes, source="").fingerprint

    texts = [(b"ab", b"cd"), (b"abc", b"d"), (b"ab", b"ce"), (b"xb", b"cd")]
    assert len({fingerprint(*text) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("files", "seq_len", "says"),
    [
        (None, 8, "No such file or directory"),
        ({}, 8, "which has no bytes"),
        ({"a": b""}, 8, "which has no bytes"),
        ({"a": b"x" * 80}, 8, "held-out part; got 8 bytes"),
        ({str(i): b"x" for i in range(9)} | {"9": b"y" * 10}, 9, "training part; got 9 bytes"),
    ],
)
def test_unusable_data(tmp_path, files, seq_len, says):
    path = tmp_path / "data"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            write(path, name, text)
    with pytest.raises(UsageError, match=says) as error:
        data.load_corpus(path, seq_len)
    assert str(path) in str(error.value) and "; give " in str(error.value)


def test_shortest_usable_data(tmp_path):
    write(tmp_path, "a", b"x" * 90)
    assert len(data.load_corpus(tmp_path / "a", seq_len=8).valid) == 9


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    write(tmp_path, "a", b"x" * 90)
    (tmp_path / "a").chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        data.load_corpus(tmp_path, seq_len=8)


def test_batches_depend_on_seed_and_step_alone():
    def starts(seed, step):
        return tuple(data.batch_starts(seed, step, 16, 1000, 8))

    assert starts(3, 5) == starts(3, 5)
    assert len({starts(seed, step) for seed in range(5) for step in range(5)}) == 25


def test_batches_reach_both_ends_of_the_data():
    starts = np.concatenate([data.batch_starts(0, step, 64, 13, 8) for step in range(20)])
    assert set(starts) == {0, 1, 2, 3, 4}  # the last window takes bytes 4 to 12
    assert list(data.spread_starts(5, 13, 8)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (8, 1)])
def test_device_windows_are_slices_of_the_data(shape):
    text = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8)
    starts = data.batch_starts(0, 0, 16, 100, 8)
    mesh = jax.make_mesh(
        shape,
        ("fsdp", "ep"),
        axis_types=(AxisType.Explicit,) * 2,
        devices=jax.devices()[: math.prod(shape)],
    )
    sharding = NamedSharding(mesh, PartitionSpec(("fsdp", "ep"), None))
    batch = data.device_windows(text, starts, 8, sharding)
    assert batch.sharding.is_equivalent_to(sharding, 2)
    assert np.asarray(batch).tolist() == [text[s : s + 9].tolist() for s in starts]


def test_order1_model_is_the_table_of_counts():
    rng = np.random.default_rng(0)
    train = rng.choice([7, 8, 255], 500, p=[0.5, 0.3, 0.2]).astype(np.uint8)
    windows = rng.choice([7, 8, 255, 0], (6, 11)).astype(np.int32)
    pairs = collections.Counter(zip(train.tolist(), train.tolist()[1:], strict=False))
    firsts = collections.Counter(train.tolist()[:-1])
    losses = [
        -math.log((pairs[a, b] + 0.1) / (firsts[a] + 256 * 0.1))
        for row in windows.tolist()
        for a, b in zip(row, row[1:], strict=False)
    ]
    expected = math.fsum(losses) / len(losses)
    assert order1.loss(order1.fit(train), windows) == pytest.approx(expected, rel=1e-12)

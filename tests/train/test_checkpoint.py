"""Checkpoints: whole on any mesh, refused when any file of them is damaged."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from expertmesh.train import checkpoint
from expertmesh.train.mesh import make_mesh
from expertmesh.train.options import UsageError

pytestmark = pytest.mark.default_jax

VALUES = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8) / 7, "n": np.int32(5)}


def state(sizes, axis_types, spec):
    mesh = make_mesh(*sizes, axis_types)
    shardings = {"w": NamedSharding(mesh, spec), "n": NamedSharding(mesh, PartitionSpec())}
    return jax.tree.map(lambda x, s: jax.device_put(jnp.asarray(x), s), VALUES, shardings)


def abstract(arrays):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 to 4, of which the last three are kept."""
    folder = tmp_path_factory.mktemp("checkpoints")
    arrays = state((2, 4), "explicit", PartitionSpec("fsdp", "ep"))
    for step in range(1, 5):
        checkpoint.save(folder, step, arrays, keep=3)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    import shutil

    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_the_last_three_are_kept(saved):
    assert sorted(entry.name for entry in saved.iterdir()) == ["2", "3", "4"]


@pytest.mark.parametrize("keep", [1, 2])
def test_unfinished_steps_do_not_count(folder, keep):
    """A crash left step 9, and one with another interval step 3; the run went on from step 4 and stops at 6."""
    arrays = state((2, 4), "explicit", PartitionSpec("fsdp", "ep"))
    for step in (3, 9):
        (folder / str(step) / "state").mkdir(parents=True, exist_ok=True)
        (folder / str(step) / checkpoint.MANIFEST).unlink(missing_ok=True)
    checkpoint.save(folder, 6, arrays, keep=keep)
    left = {entry.name for entry in folder.iterdir()}
    assert left == {"6", "9"} | ({"4"} if keep == 2 else set())
    assert checkpoint.last_good(folder, lambda _: None) == 6


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_restored_on_another_mesh(saved, axis_types):
    target = state((8, 1), axis_types, PartitionSpec(None, "fsdp"))
    step, restored = checkpoint.restore(saved, abstract(target), pytest.fail)
    assert step == 4
    for name, value in VALUES.items():
        assert restored[name].sharding == target[name].sharding
        np.testing.assert_array_equal(np.asarray(restored[name]), value)


def damaged(folder, step):
    """What `last_good` says about a folder whose newest checkpoint is damaged."""
    reports = []
    found = checkpoint.last_good(folder, reports.append)
    assert found == step - 1 and len(reports) == 1
    assert f"refused the checkpoint of step {step}" in reports[0]
    return reports[0]


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_another_manifest_is_refused(folder, text):
    (folder / "4" / checkpoint.MANIFEST).write_text(text)
    assert "no list of files" in damaged(folder, 4)


def test_any_flipped_bit_is_refused(folder):
    files = [file for file in (folder / "4" / "state").rglob("*") if file.is_file()]
    assert any(file.stat().st_size for file in files)
    for file in files:
        content = file.read_bytes()
        flipped = bytes([content[0] ^ 1]) + content[1:] if content else b"x"
        file.write_bytes(flipped)
        assert "does not match its checksum" in damaged(folder, 4)
        file.write_bytes(content)
    assert checkpoint.last_good(folder, pytest.fail) == 4


def test_missing_files_are_refused(folder):
    next(f for f in (folder / "4" / "state").rglob("*") if f.is_file()).unlink()
    assert "is missing" in damaged(folder, 4)


def test_truncated_manifest_is_refused(folder):
    manifest = folder / "4" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert "unreadable" in damaged(folder, 4)


def test_unfinished_checkpoints_are_refused(folder):
    (folder / "4" / "manifest.json").unlink()
    (folder / "5").mkdir()
    reports = []
    assert checkpoint.last_good(folder, reports.append) == 3
    assert len(reports) == 2 and all("not finished" in text for text in reports)


def test_only_corrupt_checkpoints(folder):
    for step in (2, 3, 4):
        (folder / str(step) / "state" / "_METADATA").write_text("{}")
    target = state((2, 4), "explicit", PartitionSpec("fsdp", "ep"))
    with pytest.raises(UsageError, match="--resume must find a good checkpoint; got only corrupt"):
        checkpoint.restore(folder, abstract(target), lambda _: None)


def test_no_checkpoint_was_finished(folder, tmp_path):
    target = abstract(state((2, 4), "explicit", PartitionSpec("fsdp", "ep")))
    for step in (2, 3, 4):
        (folder / str(step) / "manifest.json").unlink()
    assert checkpoint.restore(folder, target, lambda _: None) is None
    assert checkpoint.restore(tmp_path / "nothing", target, pytest.fail) is None


def full_disk(*_, **__):
    raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 6 [os_error_code='28']")


def test_what_the_system_refuses_orbax_is_its_error(folder, monkeypatch):
    arrays = state((2, 4), "explicit", PartitionSpec("fsdp", "ep"))
    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "save", full_disk)
        with pytest.raises(OSError, match="No space left on device: '.*/checkpoints/5'"):
            checkpoint.save(folder, 5, arrays, keep=2)
    checkpoint.save(folder, 5, arrays, keep=2)
    assert checkpoint.last_good(folder, pytest.fail) == 5


def test_a_refused_checkpoint_is_written_anew(folder):
    (folder / "4" / "manifest.json").unlink()
    arrays = state((2, 4), "explicit", PartitionSpec("fsdp", "ep"))
    checkpoint.save(folder, 4, arrays, keep=2)
    assert checkpoint.last_good(folder, pytest.fail) == 4
    assert sorted(entry.name for entry in folder.iterdir()) == ["3", "4"]

"""Checkpoints: what is read, where it lies on devices, and what is written, against the format written by hand."""

import collections.abc
import gc
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from cases.safetensors import read_folder, write_file, write_folder
from expertmesh.core import MeshResource, QuantizedArray, dequantize
from expertmesh.flax_moe import hf, param_specs
from expertmesh.flax_moe.checkpoint import (
    Checkpoint,
    Tensors,
    export_tensors,
    load_sharded,
    write_checkpoint,
)
from flax_moe import moe_oracle
from flax_moe.hf_oracle import (
    DEEPSEEK,
    ERNIE,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    PHI,
    QWEN2,
    QWEN3,
    make_weights,
)

pytestmark = pytest.mark.default_jax

LAYER = 4
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = (8, 4)
# Of each way that arrays lie: by turns, in one dimension more, together, outside.
ALL = [MIXTRAL, QWEN3, DEEPSEEK, QWEN2, GPT_OSS, ERNIE, LLAMA4, PHI]
IN_BLOCKS = DEEPSEEK | {"quantization_config": {"weight_block_size": list(BLOCK)}}


def shardings(hf_config, shape=(2, 4), kind=AxisType.Explicit):
    mesh = moe_oracle.make_mesh(shape, kind)
    resource = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    specs = param_specs(hf.moe_config(hf_config), resource)
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def with_blocks(weights, rng, block=BLOCK):
    """The experts in 8 bits, and the scales of their blocks."""
    made = dict(weights)
    for name, w in weights.items():
        if "experts." in name:
            scales = [-(-n // b) for n, b in zip(w.shape, block, strict=True)]
            made[name] = w.astype(E4M3)
            made[f"{name}_scale_inv"] = rng.uniform(0.5, 2, scales).astype(np.float32)
    return made


def widened(data, scale, block=BLOCK):
    """Number by number."""
    out = np.empty(data.shape, np.float32)
    for i, j in np.ndindex(data.shape):
        out[i, j] = np.float32(data[i, j]) * scale[i // block[0], j // block[1]]
    return out


def under_our_names(weights, hf_config):
    params, bias = hf.load_layer(weights, hf_config, LAYER)
    start = f"model.layers.{LAYER}.moe."
    named = {start + name: w for name, w in params.items()}
    return named if bias is None else named | {f"{start}expert_bias": bias}


def stacked(weights, hf_config):
    params, bias = hf.load_layer(weights, hf_config, LAYER)
    return hf.export_layer(params, hf_config, LAYER, expert_bias=bias, stacked=True)


class Counted(collections.abc.Mapping):
    """Arrays that note what is sliced from them."""

    def __init__(self, arrays):
        self.arrays, self.reads = arrays, []

    def __getitem__(self, name):
        return Slicer(self, name)

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)


class Slicer:
    def __init__(self, owner, name):
        self.owner, self.name, self.array = owner, name, owner.arrays[name]
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, index):
        part = self.array[index]
        self.owner.reads.append((self.name, part.size))
        return part

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self[...], dtype)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("names", [dict, stacked, under_our_names])
@pytest.mark.parametrize("hf_config", ALL, ids=lambda c: c["model_type"])
def test_a_layer_on_a_mesh(hf_config, names, kind):
    """Of every name it is what load_layer loads, laid out as asked; each number is read once."""
    weights = make_weights(hf_config, LAYER)
    for name in hf.layer_layout(hf_config, LAYER).outside:
        del weights[name]
    named = weights if names is dict else names(weights, hf_config)
    counted, told = Counted(named), []
    wanted, bias = hf.load_layer(weights, hf_config, LAYER)
    placed = shardings(hf_config, kind=kind)
    params, got_bias = load_sharded(
        counted, hf_config, LAYER, placed, progress=lambda *said: told.append(said)
    )
    for name, w in wanted.items():
        assert params[name].dtype == w.dtype and params[name].sharding == placed[name]
        np.testing.assert_array_equal(params[name], w)
    assert (bias is None) == (got_bias is None)
    np.testing.assert_array_equal(got_bias, bias)
    assert sum(size for _, size in counted.reads) == sum(w.size for w in named.values())
    fractions = [fraction for _, fraction in told]
    assert (
        fractions == sorted(fractions) and fractions[-1] == 1 and told[0][0].startswith("layer 4: ")
    )
    half = load_sharded(counted, hf_config, LAYER, placed, dtype=jnp.bfloat16).params
    assert {w.dtype for w in half.values()} == {np.dtype(jnp.bfloat16)}


def test_one_shard_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """Of a layer of 24 MB over eight devices, whose memory is not counted, never more than a shard and a matrix."""
    sizes = dict(hidden_size=256, moe_intermediate_size=512, num_experts=16)
    hf_config = QWEN3 | sizes
    weights = make_weights(hf_config, 5)
    write_folder(tmp_path, hf_config, weights)
    placed = shardings(hf_config)
    files = Checkpoint(tmp_path)
    move = jax.device_put

    def copied(x, device):
        y = jax.block_until_ready(jnp.copy(move(x, device)))
        gc.collect()  # JAX lets go of NumPy's memory when Python's collector runs, or at a later call
        return y

    monkeypatch.setattr(jax, "device_put", copied)
    gc.collect()
    gc.freeze()  # the collector leaves out what the tests before have left
    load_sharded(files, hf_config, 5, placed)  # what is compiled for the copies is not counted
    tracemalloc.start()
    params = load_sharded(files, hf_config, 5, placed).params
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.unfreeze()
    matrix = 256 * 512 * 4
    shard = params["wi"].nbytes // 8
    assert shard == 16 * 2 * matrix // 8 and shard < peak < shard + 1.5 * matrix
    assert sum(w.nbytes for w in params.values()) > 10 * shard


def test_each_process_reads_its_own(multiprocess):
    """Two processes: each half of the experts, all of the gate, and the whole is there."""
    first, second = multiprocess("flax_moe.test_checkpoint:read_a_half", processes=2, devices=4)
    names = [f"model.layers.{LAYER}.mlp.experts.{e}.down_proj.weight" for e in range(8)]
    read = [[name for name in names if name in process["read"]] for process in (first, second)]
    assert read == [names[:4], names[4:]]
    assert first["size"] == second["size"] == 8 * 3 * 12 * 16 / 2 + 16 * 8
    total = sum(float(np.square(w).sum()) for w in make_weights(QWEN3, LAYER).values())
    assert np.allclose([first["total"], second["total"]], total)


test_each_process_reads_its_own.pytestmark = [pytest.mark.multiprocess]


def read_a_half():
    """In one of two processes, which the axis of experts parts."""
    counted = Counted(make_weights(QWEN3, LAYER))
    mesh = jax.make_mesh((2, 4), ("ep", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    specs = param_specs(hf.moe_config(QWEN3), MeshResource(fsdp_resource="fsdp", ep_resource="ep"))
    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = load_sharded(counted, QWEN3, LAYER, placed).params
    squares = jax.jit(lambda params: sum(jnp.square(w).sum() for w in params.values()))(params)
    reads = counted.reads
    return {
        "read": sorted({name for name, _ in reads}),
        "size": sum(size for _, size in reads),
        "total": float(squares),
    }


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
def test_8_bits_are_kept_or_widened(ours, tmp_path):
    """On a mesh whose shards cut D between blocks; F is one block and a half."""
    weights = with_blocks(make_weights(DEEPSEEK, LAYER), np.random.default_rng(0))
    wide = {
        n: widened(w, weights[f"{n}_scale_inv"]) if w.dtype == E4M3 else w
        for n, w in weights.items()
    }
    wide = {n: w for n, w in wide.items() if "scale_inv" not in n}
    want = hf.load_layer(wide, DEEPSEEK, LAYER).params
    write_folder(tmp_path, IN_BLOCKS, weights)
    files = Checkpoint(tmp_path)
    if ours:
        files = our_blocks(files)
    placed = shardings(DEEPSEEK)
    kept, bias = load_sharded(files, IN_BLOCKS, LAYER, placed, dtype=np.float32, keep_fp8=True)
    loaded = load_sharded(files, IN_BLOCKS, LAYER, placed, dtype=np.float32).params
    for name, w in want.items():
        if name != "gate_kernel":
            q = kept[name]
            assert isinstance(q, QuantizedArray) and q.data.dtype == E4M3 and q.dtype == "float32"
            assert q.data.sharding == placed[name] == q.scale.sharding
            np.testing.assert_array_equal(dequantize(q), w)
        np.testing.assert_array_equal(loaded[name], w)
    half = load_sharded(files, IN_BLOCKS, LAYER, placed).params["wi"]
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, want["wi"].astype(jnp.bfloat16))
    back = {
        n: w
        for t in export_tensors(kept, IN_BLOCKS, LAYER, expert_bias=bias, fp8=True)
        for n, w in t.make().items()
    }
    assert set(back) == set(weights)
    for name, w in weights.items():
        assert back[name].dtype == w.dtype, name
        np.testing.assert_array_equal(back[name], w)


def our_blocks(files):
    """The same under our names, matrix by matrix: scales [E, D / 4, 2, ceil(F / 8)] of `wi`, and so on."""
    start, theirs = f"model.layers.{LAYER}.moe.", f"model.layers.{LAYER}.mlp."
    kinds = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    out = {f"{start}gate_kernel": files[f"{theirs}gate.weight"].T}
    out[f"{start}expert_bias"] = files[f"{theirs}gate.e_score_correction_bias"]
    for suffix in ("", "_scale_inv"):
        gate, up, down = (
            np.stack([files[f"{theirs}experts.{e}.{kind}{suffix}"].T for e in range(16)])
            for kind in kinds
        )
        out[f"{start}wi{suffix}"] = np.stack([gate, up], axis=2)
        out[f"{start}wo{suffix}"] = down
        gate, up, down = (files[f"{theirs}shared_experts.{kind}{suffix}"].T for kind in kinds)
        out[f"{start}shared_wi{suffix}"] = np.stack([gate, up], axis=1)
        out[f"{start}shared_wo{suffix}"] = down
    return out


def test_export_in_blocks():
    """Of numbers: by DeepSeek's formula scale = amax / 448, to half a unit; and it reads back equal."""
    weights = make_weights(DEEPSEEK, LAYER)
    params, bias = load_sharded(weights, DEEPSEEK, LAYER, shardings(DEEPSEEK))
    tensors = export_tensors(params, IN_BLOCKS, LAYER, expert_bias=bias, fp8=True)
    made = {name: w for each in tensors for name, w in each.make().items()}
    for name, w in weights.items():
        if "experts." not in name:
            np.testing.assert_array_equal(made[name], w)
            continue
        scale = made[f"{name}_scale_inv"]
        for i, j in np.ndindex(scale.shape):
            part = w[8 * i : 8 * i + 8, 4 * j : 4 * j + 4]
            assert np.isclose(scale[i, j], np.abs(part).max() / 448, rtol=1e-6)
        error = np.abs(widened(made[name], scale) - w)
        assert (error <= np.abs(w) * 2**-4 * 1.001 + scale.max() * 2**-9).all()
    kept, _ = load_sharded(made, IN_BLOCKS, LAYER, shardings(DEEPSEEK), keep_fp8=True)
    again = export_tensors(kept, IN_BLOCKS, LAYER, expert_bias=bias, fp8=True)
    for each in again:
        for name, w in each.make().items():
            np.testing.assert_array_equal(w, made[name])
    half = export_tensors(kept, IN_BLOCKS, LAYER, expert_bias=bias, dtype=jnp.bfloat16)
    for each in half:
        for name, w in each.make().items():
            if f"{name}_scale_inv" in made:
                want = widened(made[name], made[f"{name}_scale_inv"]).astype(jnp.bfloat16)
                np.testing.assert_array_equal(w, want)
                assert w.dtype == jnp.bfloat16


def arrays_of_all_kinds():
    rng = np.random.default_rng(0)
    return {
        "odd.weight": rng.normal(size=(3, 5)).astype(E4M3),
        "a.weight": rng.normal(size=(7, 6)).astype(np.float32),
        "b.bias": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "step": np.array(7, np.int64),
    }


@pytest.mark.parametrize("size, files", [(10**9, 1), (100, 3), (1, 5)])
def test_what_is_written_is_the_format(tmp_path, size, files):
    arrays, told = arrays_of_all_kinds(), []
    tensors = [
        Tensors(types={k: (w.shape, w.dtype)}, make=lambda k=k, w=w: {k: w})
        for k, w in arrays.items()
    ]
    write_checkpoint(
        tmp_path / "new", tensors, {"a": 1}, max_shard_size=size, progress=lambda *a: told.append(a)
    )
    found, places = read_folder(tmp_path / "new")
    read = Checkpoint(tmp_path / "new")
    assert set(found) == set(arrays) == set(read) and len(set(places.values())) == files
    for name, w in arrays.items():
        assert found[name].dtype == w.dtype == read[name].dtype
        np.testing.assert_array_equal(found[name], w)
        np.testing.assert_array_equal(read[name], w)
    index = tmp_path / "new/model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        said = json.loads(index.read_text())
        assert said == {
            "metadata": {"total_size": sum(w.nbytes for w in arrays.values())},
            "weight_map": places,
        }
    assert [what for what, _ in told] == list(arrays) and told[-1][1] == 1
    assert read.config == {"a": 1}
    with pytest.raises(
        ValueError, match="write_checkpoint: the folder must be empty; got .*new with"
    ):
        write_checkpoint(tmp_path / "new", tensors, {})
    wrong = Tensors(types={"x": ((2,), np.dtype(np.float32))}, make=lambda: {"x": np.zeros(3)})
    with pytest.raises(ValueError, match=r"x must be float32\[2\].*got float64\[3\]"):
        write_checkpoint(tmp_path / "wrong", [wrong], {})
    assert not list((tmp_path / "wrong").glob("*.safetensors"))


def test_folders_that_are_refused(tmp_path):
    arrays = arrays_of_all_kinds()
    folder = write_folder(tmp_path / "a", {}, arrays, {"c": np.zeros(3, np.float32)})
    (folder / "weights-1.safetensors").unlink()
    with pytest.raises(ValueError, match="got no weights-1.safetensors, 1 of 2 missing"):
        Checkpoint(folder)
    with pytest.raises(ValueError, match="must have .*safetensors.*got none"):
        Checkpoint(tmp_path / "nothing")
    path = tmp_path / "b/model.safetensors"
    path.parent.mkdir()
    write_file(path, arrays)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, 40, 4, 0):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=rf"model.safetensors must have.*got {kept} bytes"):
            Checkpoint(path.parent)
    path.write_bytes(whole.replace(b'"I64"', b'"U64"'))
    with pytest.raises(ValueError, match="got step of U64 in"):
        Checkpoint(path.parent)


def with_header(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


@pytest.mark.parametrize(
    "header, words",
    [
        (b"[]", "a header of JSON by names; got \\[\\]"),
        (b"{no", "a header of JSON by names; got JSONDecodeError"),
        (b'{"w": 3}', "of as many bytes; got 3 of w"),
        (b'{"w": {"dtype": "F32", "shape": [2]}}', "of as many bytes; got .* of w"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 8]}}', "of as many bytes"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', "of as many bytes"),
        (b'{"w": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}', "of as many bytes"),
    ],
)
def test_headers_that_are_refused(header, words, tmp_path):
    with_header(tmp_path / "model.safetensors", header)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=words):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("config.json", "[]", "config.json must have JSON by names; got \\[\\]"),
        ("config.json", "{no", "config.json must have JSON by names; got JSONDecodeError"),
        ("model.safetensors.index.json", "{}", "index.json must have a weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 3}}',
            "index.json must have a weight_map",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "weights-0.safetensors", "z": "weights-0.safetensors"}}',
            "got no z in weights-0.safetensors, 1 of 2 missing",
        ),
    ],
)
def test_folders_whose_texts_are_refused(name, text, words, tmp_path):
    folder = write_folder(tmp_path / "a", {}, {"a": np.zeros(3, np.float32)})
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        Checkpoint(folder)


def test_layers_that_are_refused():
    weights = with_blocks(make_weights(DEEPSEEK, LAYER), np.random.default_rng(0))
    placed = shardings(DEEPSEEK)
    few = {name: w for name, w in placed.items() if name != "wo"}
    with pytest.raises(ValueError, match="load_sharded: shardings must have .*missing wo;"):
        load_sharded(weights, IN_BLOCKS, LAYER, few)
    with pytest.raises(
        ValueError, match=r"whole blocks; got wi .*8 of dimension 1 on a device, blocks of 16"
    ):
        coarse = IN_BLOCKS | {"quantization_config": {"weight_block_size": [16, 16]}}
        load_sharded(weights, coarse, LAYER, placed, keep_fp8=True)
    name = f"model.layers.{LAYER}.mlp.experts.3.up_proj.weight"
    mixed = weights | {name: weights[name].astype(np.float32)}
    with pytest.raises(
        ValueError, match="of wi must all have 8 bits.* and .*3.up_proj.weight with more"
    ):
        load_sharded(mixed, IN_BLOCKS, LAYER, placed, keep_fp8=True)
    with pytest.raises(
        ValueError, match="of wi must have one dtype.*float32, others of bfloat16; pass"
    ):
        load_sharded(mixed, IN_BLOCKS, LAYER, placed)
    with pytest.raises(ValueError, match="missing 1: model.layers.4.moe.wo;"):
        ours = under_our_names(weights, IN_BLOCKS)
        load_sharded(
            {n: w for n, w in ours.items() if not n.endswith(".wo")}, DEEPSEEK, LAYER, placed
        )
    with pytest.raises(ValueError, match="weight_scale_inv.*weight_block_size=None"):
        load_sharded(weights, DEEPSEEK, LAYER, placed)
    params, _ = hf.load_layer(make_weights(QWEN3, LAYER), QWEN3, LAYER)
    with pytest.raises(
        ValueError, match="export_tensors: expert_bias of a qwen3_moe must be of shape None"
    ):
        export_tensors(params, QWEN3, LAYER, expert_bias=np.zeros(8))
    params, _ = hf.load_layer(make_weights(GPT_OSS, LAYER), GPT_OSS, LAYER)
    with pytest.raises(ValueError, match=r"an array for each matrix; got .*gate_up_proj \(8, 16"):
        export_tensors(params, GPT_OSS, LAYER, fp8=True)

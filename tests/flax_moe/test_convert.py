"""`python -m expertmesh.convert`: folders there and back, written and read by hand."""

import gc
import io
import json
import pathlib
import re
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from cases.safetensors import read_folder, write_folder
from expertmesh.convert import main
from expertmesh.convert.cli import ProgressLine
from expertmesh.core import MeshResource
from expertmesh.flax_moe import hf, param_specs
from expertmesh.flax_moe.checkpoint import Checkpoint, load_sharded
from flax_moe.hf_oracle import (
    DEEPSEEK,
    ERNIE,
    GPT_OSS,
    GRANITE,
    JAMBA,
    LLAMA4,
    MIXTRAL,
    PHI,
    QWEN2,
    QWEN3,
    make_weights,
)

pytestmark = pytest.mark.default_jax

ALL = [MIXTRAL, QWEN3, DEEPSEEK, QWEN2, GPT_OSS, ERNIE, GRANITE, LLAMA4, PHI]
E4M3 = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 4]}
SHARD = ["--max-shard-size", "20KB", "--quiet"]


def others():
    """What is of no MoE layer: dense layers, norms, a layer for prediction of more tokens, counters."""
    rng = np.random.default_rng(9)
    return {
        "model.embed_tokens.weight": rng.normal(size=(32, 16)).astype(ml_dtypes.bfloat16),
        "model.layers.0.mlp.gate_proj.weight": rng.normal(size=(40, 16)).astype(np.float32),
        "model.layers.4.self_attn.q_proj.weight": rng.normal(size=(16, 16)).astype(np.float16),
        "model.layers.9.mlp.experts.0.up_proj.weight": rng.normal(size=(12, 16)).astype(E4M3),
        "model.norm.weight": np.ones(16, np.float32),
        "steps": np.array(3, np.int64),
    }


def model(hf_config, dtype=ml_dtypes.bfloat16):
    layers = hf.moe_layers(hf_config)
    blocks = tuple(hf.layer_layout(hf_config, layer).block for layer in layers)
    weights = {name: w for name, w in others().items() if not name.startswith(blocks)}
    for layer in layers:
        for name, w in make_weights(hf_config, layer, seed=layer).items():
            kept = name.endswith("correction_bias")
            weights[name] = w if kept else w.astype(dtype)
    return weights


def in_blocks(weights):
    """The experts in 8 bits, in blocks of 8 x 4."""
    made, rng = dict(weights), np.random.default_rng(3)
    for name, w in weights.items():
        if "experts." in name and name in weights and "layers.9" not in name:
            made[name] = w.astype(E4M3)
            size = (-(-w.shape[0] // 8), -(-w.shape[1] // 4))
            made[f"{name}_scale_inv"] = rng.uniform(0.5, 2, size).astype(np.float32)
    return made


@pytest.fixture
def folder(tmp_path):
    """Makes a source of two files."""

    def make(hf_config, weights):
        items = list(weights.items())
        made = write_folder(tmp_path / "source", hf_config, dict(items[::2]), dict(items[1::2]))
        (made / "tokenizer.json").write_text("{}")
        (made / "pytorch_model.bin").write_text("another copy")
        return made

    return make


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, w in wanted.items():
        assert found[name].dtype == w.dtype and found[name].shape == w.shape, name
        assert found[name].tobytes() == w.tobytes(), name


def converted(source, to, name, *options):
    """The arrays and the config of what a run writes."""
    target = source.parent / name
    assert main([str(source), str(target), "--to", to, *SHARD, *options]) == 0
    return target, read_folder(target)[0], json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("hf_config", ALL, ids=lambda c: c["model_type"])
def test_there_and_back(hf_config, folder):
    """Our names hold what load_layer loads; theirs again the same bytes; the other weights and files are copied."""
    weights = model(hf_config)
    source = folder(hf_config, weights)
    ours, found, config = converted(source, "expertmesh", "ours")
    wanted = {name: w for name, w in others().items() if name in weights}
    for layer in hf.moe_layers(hf_config):
        params, bias = hf.load_layer(weights, hf_config, layer)
        wanted |= {f"model.layers.{layer}.moe.{name}": w for name, w in params.items()}
        wanted |= {} if bias is None else {f"model.layers.{layer}.moe.expert_bias": bias}
        wanted |= {name: weights[name] for name in hf.layer_layout(hf_config, layer).outside}
    same(found, wanted)
    back, found, again = converted(ours, "huggingface", "back")
    same(found, weights)
    assert config == again == hf_config
    for target in (ours, back):
        assert (target / "tokenizer.json").read_text() == "{}"
        assert not (target / "pytorch_model.bin").exists()
        assert (target / "model.safetensors.index.json").exists()


def test_a_model_of_several_parts(folder):
    """Its text model's layers, behind their prefix; the other parts are copied."""
    several = {"model_type": "llama4", "text_config": LLAMA4}
    weights = {f"language_model.{name}": w for name, w in model(LLAMA4).items()}
    weights["vision_model.layers.1.feed_forward.weight"] = np.ones((4, 4), np.float32)
    prefix = ["--prefix", "language_model.model."]
    ours, found, config = converted(folder(several, weights), "expertmesh", "ours", *prefix)
    assert "language_model.model.layers.5.moe.shared_wi" in found and config == several
    same(converted(ours, "huggingface", "back", *prefix)[1], weights)


def test_arrays_that_no_config_has(folder, tmp_path, capsys):
    """The message names the text model, whose config says what there is."""
    weights = {f"language_model.{name}": w for name, w in model(LLAMA4).items()}
    weights["language_model.model.layers.5.feed_forward.router.bias"] = np.ones(4, np.float32)
    given = folder({"text_config": LLAMA4}, weights), tmp_path / "target"
    said = refused(capsys, *given, "--to", "expertmesh", "--prefix", "language_model.model.")
    assert "the blocks of a llama4_text must have the arrays of its config alone" in said


def test_8_bits_in_some_layers(folder):
    """As a whole model of 16 bits: no config says that anything else has 8."""
    last = hf.moe_layers(DEEPSEEK)[-1]
    plain, packed = model(DEEPSEEK), in_blocks(model(DEEPSEEK))
    some = {k: w for k, w in packed.items() if f"layers.{last}." not in k}
    some |= {k: w for k, w in plain.items() if f"layers.{last}." in k}
    some = {k: w for k, w in some.items() if "layers.9" not in k}
    source = folder(DEEPSEEK | {"quantization_config": FP8}, some)
    _, found, config = converted(source, "expertmesh", "wide")
    assert all(w.dtype.itemsize > 1 for w in found.values())
    assert "quantization_config" not in config


def test_8_bits_there_and_back(folder):
    """Kept bit for bit under either names; widened without --fp8, to --dtype."""
    hf_config = DEEPSEEK | {"quantization_config": FP8}
    weights = in_blocks(model(DEEPSEEK))
    source = folder(hf_config, weights)
    ours, found, config = converted(source, "expertmesh", "ours", "--fp8")
    assert found["model.layers.3.moe.wi"].dtype == E4M3 and config == hf_config
    assert found["model.layers.3.moe.wi_scale_inv"].shape == (16, 4, 2, 2)
    expert = "model.layers.4.mlp.experts.7.up_proj.weight_scale_inv"
    np.testing.assert_array_equal(
        found["model.layers.4.moe.wi_scale_inv"][7, :, 1], weights[expert].T
    )
    _, found, config = converted(ours, "huggingface", "back", "--fp8")
    same(found, weights)
    assert config == hf_config
    for start, name in ((source, "a"), (ours, "b")):
        wide, found, config = converted(start, "huggingface", name, "--dtype", "float32")
        params = hf.load_layer(weights, hf_config, 4, dtype=np.float32).params
        wanted = hf.export_layer(
            params,
            DEEPSEEK,
            4,
            expert_bias=weights["model.layers.4.mlp.gate.e_score_correction_bias"],
        )
        for key, w in wanted.items():
            np.testing.assert_array_equal(found[key], w)
            assert found[key].dtype == np.float32
        kept = config["quantization_config"]["modules_to_not_convert"]  # layers.9 has 8 bits
        assert "model.layers.4.mlp.experts" in kept and "model.layers.4.mlp.shared_experts" in kept
    _, found, config = converted(wide, "huggingface", "c", "--fp8")
    assert (
        "model.layers.4.mlp.experts" not in config["quantization_config"]["modules_to_not_convert"]
    )


def in_4_bits(hf_config, weights):
    """The experts of gpt-oss packed, and the numbers that they stand for, one by one."""
    packed, wide, rng = dict(weights), dict(weights), np.random.default_rng(4)
    for name, w in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            E, D, F = w.shape
            blocks = rng.integers(0, 256, size=(E, F, D // 32, 16), dtype=np.uint8)
            scales = rng.integers(120, 128, size=(E, F, D // 32), dtype=np.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            for e, d, f in np.ndindex(E, D, F):
                byte = int(blocks[e, f, d // 32, d % 32 // 2])
                bits = byte >> 4 if d % 2 else byte & 15
                size = [0, 0.5, 1, 1.5, 2, 3, 4, 6][bits & 7] * 2.0 ** (
                    int(scales[e, f, d // 32]) - 127
                )
                w[e, d, f] = -size if bits & 8 else size
            wide[name] = w
    return packed, wide


def test_4_bits_are_widened(folder):
    """Under either names, to the same 16 bits; a layer straight from the files, and parts of it on a mesh."""
    small = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}
    hf_config = GPT_OSS | small | {"num_experts_per_tok": 2}
    packed, wide = in_4_bits(hf_config, model(hf_config))
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    source = folder(hf_config | method, packed)
    _, found, config = converted(source, "huggingface", "theirs")
    same(found, wide)
    assert config == hf_config
    ours, found, config = converted(source, "expertmesh", "ours")
    want = hf.load_layer(wide, hf_config, 1).params
    for name, w in want.items():
        np.testing.assert_array_equal(found[f"model.layers.1.moe.{name}"], w)
    files = Checkpoint(source)
    loaded = hf.load_layer(files, files.config, 1).params
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    specs = param_specs(
        hf.moe_config(hf_config), MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    )
    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    sharded = load_sharded(files, files.config, 1, placed).params
    for name, w in want.items():
        np.testing.assert_array_equal(loaded[name], w)
        np.testing.assert_array_equal(sharded[name], w)


def test_8_bits_are_made(folder):
    """The same from either names; the config says which modules keep 16 bits, and forgets it when none has 8."""
    weights = {n: w for n, w in model(MIXTRAL).items() if "layers.9" not in n}
    source = folder(MIXTRAL, weights)
    ours, _, _ = converted(source, "expertmesh", "ours")
    fp8_ours, _, _ = converted(source, "expertmesh", "fp8-ours", "--fp8")
    made = [
        converted(start, "huggingface", f"fp8-{i}", "--fp8")
        for i, start in enumerate((source, ours, fp8_ours))
    ]
    (theirs, found, config), *rest = made
    for _, other, other_config in rest:
        same(other, found)
        assert other_config == config
    said = config["quantization_config"]
    assert said["quant_method"] == "fp8" and said["weight_block_size"] == [128, 128]
    assert said["modules_to_not_convert"] == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.block_sparse_moe.gate",
        "model.layers.4.self_attn.q_proj",
    ]
    name = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    (scale,) = found[f"{name}_scale_inv"].ravel()
    w = weights[name].astype(np.float32)
    assert np.isclose(scale, np.abs(w).max() / 448)
    np.testing.assert_allclose(found[name].astype(np.float32) * scale, w, atol=np.abs(w).max() / 16)
    same(
        {n: found[n] for n in others() if n in found},
        {n: w for n, w in others().items() if n in weights},
    )
    for start, to in ((theirs, "huggingface"), (fp8_ours, "expertmesh")):
        _, found, config = converted(start, to, f"wide-{to}")
        assert config == MIXTRAL
        assert {w.dtype for n, w in found.items() if "moe" in n} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("options, most", [((), 1.3), (("--fp8",), 1.8)], ids=["as-it-is", "fp8"])
def test_one_tensor_at_a_time_is_in_memory(folder, tmp_path, options, most):
    """There and back, of a model of 38 MB: at most the largest array of 16 bits once, and what compiling takes."""
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16, num_hidden_layers=12)
    hf_config = QWEN3 | sizes | {"mlp_only_layers": []}
    weights = {
        name: w.astype(ml_dtypes.bfloat16)
        for layer in hf.moe_layers(hf_config)
        for name, w in make_weights(hf_config, layer).items()
    }
    source, total = folder(hf_config, weights), sum(w.nbytes for w in weights.values())
    del weights
    largest = 16 * 256 * 2 * 256 * 2  # wi of a layer
    assert total > 8 * largest
    convert = [str(source), str(tmp_path / "ours"), "--to", "expertmesh", "--quiet"]
    back = [str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "huggingface", "--quiet"]
    gc.collect()
    gc.freeze()  # the collector leaves out what the tests before have left
    tracemalloc.start()
    assert main([*convert, *options]) == main([*back, *options]) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.unfreeze()
    print(f"{peak / largest:.2f} of the largest array")
    assert largest / 2 < peak < most * largest


def refused(capsys, *arguments):
    assert main([*map(str, arguments), *SHARD]) == 2
    said = capsys.readouterr().err
    assert said.startswith("convert: error: ") and said.count("\n") == 1
    return said


def test_what_is_refused(folder, tmp_path, capsys):
    """In one line that names the field, and before anything is written."""
    weights = model(DEEPSEEK)
    target = tmp_path / "target"
    for change, words in (
        ({"model_type": "gpt2"}, "model_type must be one of mixtral"),
        ({"scoring_func": "softmax"}, "scoring_func of a deepseek_v3 must be 'sigmoid'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.quant_method must be 'fp8'",
        ),
        ({"quantization_config": "fp8"}, "quantization_config of a deepseek_v3 must be a mapping"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, "be two ints of at least 1"),
        ({"n_shared_experts": 1.0}, "n_shared_experts or num_shared_experts of"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3"),
        ({"num_hidden_layers": 6}, "of layer 5's block; missing 53"),
        ({"moe_intermediate_size": 13}, "must be (13, 16), by the config's sizes"),
    ):
        source = folder(DEEPSEEK | change, weights)
        assert words in refused(capsys, source, target, "--to", "expertmesh")
        assert not target.exists(), change
    for hf_config, step in (
        (LLAMA4, "interleave_moe_layer_step"),
        (JAMBA, "expert_layer_period"),
        (ERNIE, "moe_layer_interval"),
    ):
        source = folder(hf_config | {step: 0}, weights)
        said = refused(capsys, source, target, "--to", "expertmesh")
        assert f"{step} of a {hf_config['model_type']} must be at least 1; got 0" in said
    name = "model.layers.3.mlp.experts.0.up_proj.weight"
    integers = weights | {name: weights[name].astype(np.int32)}
    said = refused(capsys, folder(DEEPSEEK, integers), target, "--to", "expertmesh")
    assert f"{name} must be floating point; got dtype=int32" in said and not target.exists()
    more = weights | {"model.layers.3.mlp.gate.bias": np.ones(16, np.float32)}
    said = refused(capsys, folder(DEEPSEEK, more), target, "--to", "expertmesh")
    assert "got also 1: model.layers.3.mlp.gate.bias; MoEConfig has no place" in said
    for hf_config, name in ((GPT_OSS, "gate_up_proj"), (GRANITE, "input_linear")):
        source = folder(hf_config, model(hf_config))
        for to in ("expertmesh", "huggingface"):
            said = refused(capsys, source, target, "--to", to, "--fp8")
            assert "with fp8 the files of a model must have an array for each matrix; got" in said
            assert name in said and not target.exists()
    source = folder(DEEPSEEK, weights)
    said = refused(capsys, source, source, "--to", "expertmesh")
    assert "the folder must be empty" in said
    said = refused(capsys, tmp_path / "none", target, "--to", "expertmesh")
    assert "none must have *.safetensors" in said
    with pytest.raises(SystemExit) as info:
        main([str(source), str(target), "--to", "ours"])
    assert info.value.code == 2
    with pytest.raises(SystemExit):
        main([str(source), str(target), "--to", "expertmesh", "--max-shard-size", "0GB"])
    assert "must be a size above 0; got '0GB'" in capsys.readouterr().err


def test_the_page_runs(tmp_path, monkeypatch):
    """Every command that docs/checkpoints.md shows, in its order, on small models of these names."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 4]}
    blocks = in_blocks(model(DEEPSEEK))
    write_folder(tmp_path / "DeepSeek-V3", DEEPSEEK | {"quantization_config": fp8}, blocks)
    write_folder(tmp_path / "Mixtral-8x7B", MIXTRAL, model(MIXTRAL))
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/checkpoints.md"
    commands = re.findall(r"^\$ python -m expertmesh.convert (.*)$", page.read_text(), re.MULTILINE)
    assert len(commands) == 4
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main([*command.split(), "--quiet"]) == 0
    same(read_folder(tmp_path / "deepseek-back")[0], blocks)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_line():
    watched, logged = Terminal(), io.StringIO()
    for stream in (watched, logged):
        line = ProgressLine(stream)
        for i in range(1, 41):
            line(f"weight {i}", i / 40)
    assert watched.getvalue().count("\r") == 40 and watched.getvalue().count("\n") == 1
    lines = logged.getvalue().splitlines()
    assert 9 <= len(lines) <= 12 and lines[-1] == "convert: 100% 0 s left, weight 40"


def test_the_program(folder):
    """As a program of its own, with progress on stderr."""
    source = folder(QWEN3, model(QWEN3))
    command = [sys.executable, "-m", "expertmesh.convert"]
    run = subprocess.run(
        [*command, source, source.parent / "ours", "--to", "expertmesh"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "" and run.stderr.splitlines()[-1].startswith("convert: 100% 0 s left, ")
    assert "model.layers.5.moe.wo" in read_folder(source.parent / "ours")[0]

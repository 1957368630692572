"""The code that the docs show runs, on what the text around it says is there."""

import dataclasses
import importlib
import pathlib
import re

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import expertmesh.core
import expertmesh.ep
import expertmesh.flax_moe
from expertmesh.core import grouped_gemm
from expertmesh.ep import EpConfig, combine
from expertmesh.flax_moe import linen, nnx
from flax_moe.hf_oracle import QWEN3_EACH

pytestmark = pytest.mark.default_jax

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
SMALL = dict(num_experts=4, top_k=2, expert_dim=128)
# What is imported everywhere, as in these pages' first lines.
PUBLIC = {
    name: getattr(module, name)
    for module in (expertmesh.core, expertmesh.ep, expertmesh.flax_moe)
    for name in module.__all__
} | {"jax": jax, "linen": linen, "nnx": nnx}


def snippets(page):
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )


def run(code, page, **names):
    """What the names stand for afterwards."""
    space = PUBLIC | names
    exec(compile(code, page, "exec"), space)  # noqa: S102
    return space


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def sizes(*shape):
    return jnp.full(shape, 2, jnp.int32)


def shapes_of(shown, **arrays):
    """Those of what a function of names returns, which is traced and not run."""
    return jax.tree.map(jnp.shape, jax.eval_shape(lambda arrays: shown(**arrays), arrays))


def test_core():
    (code,) = snippets("core.md")
    given = dict(x=normal(1, 16, 8), logits=normal(1, 16, 4), wi=normal(4, 8, 8))
    assert shapes_of(lambda **a: run(code, "core.md", E=4, **a)["y"], **given) == (1, 16, 8)


def test_exchange():
    """Run: the second raises if something was dropped, from values."""
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Explicit,), devices=jax.devices()[:2])
    tokens, weights, idx = jax.device_put(
        (normal(8, 16), normal(8, 2), jnp.arange(16).reshape(8, 2) % 4),
        NamedSharding(mesh, PartitionSpec("ep")),
    )

    def experts(rows, group_sizes):
        return 3 * rows

    (code,) = snippets("ep.md")
    weighted = jax.jit(lambda **a: run(code, "ep.md", experts=experts, **a)["out"])
    y = weighted(tokens=tokens, topk_weights=weights, topk_idx=idx)
    assert jnp.allclose(y, 3 * weights.sum(axis=1, keepdims=True) * tokens, atol=1e-5)
    code, by_demand, by_copies = snippets("expert-parallelism.md")
    found = run(code, "expert-parallelism.md", experts=experts, tokens=tokens, topk_idx=idx)
    assert jnp.allclose(found["out"], 6 * tokens, atol=1e-5)
    names = dict(dataclasses=dataclasses, tokens=tokens, topk_idx=idx)
    found = run(by_demand, "expert-parallelism.md", **names)
    # Four experts of the first rank have four tokens each, padded to eight.
    assert found["rows"].shape == (2, 32, 16) and not found["handle"].num_dropped.any()
    assert jnp.allclose(combine(found["handle"], found["rows"]), 2 * tokens, atol=1e-5)
    wi = jax.device_put(
        jnp.broadcast_to(3 * jnp.eye(16), (64, 16, 16)), NamedSharding(mesh, PartitionSpec("ep"))
    )
    shown = dict(config=EpConfig(num_experts=64, axis="ep"), tokens=tokens, topk_idx=idx, wi=wi)
    found = run(by_copies, "expert-parallelism.md", experts=grouped_gemm, **shown)
    assert jnp.allclose(combine(found["handle"], found["y"]), 6 * tokens, atol=1e-4)


def test_without_nvlink():
    """Its time is that of the table."""
    (code,) = snippets("without-nvlink.md")
    ms = run(code, "without-nvlink.md")["ms"]
    page = (DOCS / "without-nvlink.md").read_text()
    row = next(row for row in page.splitlines() if row.startswith("| 4 | fp8_block, quantize"))
    assert float(row.split("|")[-3]) == round(ms, 1)


def test_quantization():
    formats, layers = snippets("quantization.md")

    def shown(x, **arrays):
        return run(formats, "quantization.md", x=x)["y"], run(
            layers, "quantization.md", x=x, **arrays
        )["y"]

    given = dict(x=normal(4, 256), weight=normal(256, 512), bias=normal(512))
    given |= dict(rows=normal(1, 32, 256), wi=normal(4, 256, 128), group_sizes=sizes(1, 4))
    assert shapes_of(shown, **given) == ((4, 256), (1, 32, 128))


def test_block():
    """Shapes only: they are those of real models."""
    first, file, outside, bias, placement, fewer_bits, state, microbatches = snippets("flax_moe.md")

    def shown():
        small, x = jnp.ones((2, 8, 256), jnp.bfloat16), jnp.ones((2, 8, 2048), jnp.bfloat16)
        out = run(first, "flax_moe.md", x=x, cross_entropy=jnp.sum)["out"]
        given = dict(logits=jnp.ones((2, 8, 64)), topk_weights=jnp.ones((2, 8, 6)))
        weighted = run(outside, "flax_moe.md", x=x, **given)["weighted"]
        config = expertmesh.flax_moe.MoEConfig(
            **SMALL, use_expert_bias=True, score_function="sigmoid"
        )
        run(file, "flax_moe.md", config=config)
        params = expertmesh.flax_moe.init_params(jax.random.key(0), 256, config)
        both = run(
            bias,
            "flax_moe.md",
            module=linen.MoEBlock(config),
            block=nnx.MoEBlock(256, config, rngs=flax.nnx.Rngs(0)),
            params=params,
            bias=jnp.zeros(4),
            x=small,
        )
        placed = run(
            placement,
            "flax_moe.md",
            counts=np.arange(4),
            ranks=2,
            params=params,
            opt_state={"mu": params},
            bias=jnp.zeros(4),
        )
        config = run(fewer_bits, "flax_moe.md")["config"]
        delayed = expertmesh.flax_moe.MoEConfig(**SMALL, recipe="fp8_delayed")
        begun = expertmesh.flax_moe.init_quant_state(delayed)
        kept = run(
            state,
            "flax_moe.md",
            module=linen.MoEBlock(delayed),
            params=params,
            state=begun,
            x=small,
        )["state"]
        weights = expertmesh.flax_moe.init_params(jax.random.key(0), 2048, config)
        cached = run(
            microbatches, "flax_moe.md", params=weights, config=config, microbatches=[x, x]
        )
        assert weighted.y.shape == x.shape and weighted.entropy is None
        return out.y, both["bias"], kept, cached["out"].y, placed["opt_state"]["mu"]

    y, moved, kept, cached, moments = jax.eval_shape(shown)
    assert y.shape == cached.shape == (2, 8, 2048) and moved.shape == (4,) and kept
    assert moments["wi"].shape == (4, 256, 2, 128)


def test_stages():
    """Run over (pp, ep); the values are those of `moe`."""
    parts, two, backward, pipeline = snippets("stages.md")
    moe, stages = expertmesh.flax_moe.moe, expertmesh.flax_moe.stages
    config = expertmesh.flax_moe.MoEConfig(**SMALL, dtype=jnp.float32, aux_loss_coeff=0.5)
    blocks = [expertmesh.flax_moe.init_params(jax.random.key(i), 256, config) for i in range(2)]
    params, x = blocks[0], normal(4, 8, 256)
    names = dict(stages=stages, config=config, jnp=jnp, PartitionSpec=PartitionSpec)
    given = dict(params=params, x=x, dy=x, **names)
    space = run(parts, "stages.md", **given)
    assert jnp.allclose(space["y"], moe(params, x, config).y, atol=1e-5)
    first, second, _ = run(two, "stages.md", **names)["two_microbatches"](params, x, 2 * x, config)
    assert jnp.allclose(first, space["y"], atol=1e-5)
    assert jnp.allclose(second, moe(params, 2 * x, config).y, atol=1e-5)
    pulled = run(backward, "stages.md", **given, routed=space["routed"])
    assert pulled["d_params"]["wo"].any() and pulled["d_routed"].x.shape == x.shape

    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("pp", "ep"), kinds, devices=jax.devices()[:4])
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *blocks)
    specs = {k: PartitionSpec("pp", *["ep"] * (k != "gate_kernel")) for k in stacked}
    names |= dict(mesh=mesh, params=jax.device_put(stacked, shardings(mesh, specs)))
    tokens = NamedSharding(mesh, PartitionSpec(None, "ep"))
    names |= dict(microbatches=jax.device_put(np.stack([x, 2 * x]), tokens))
    y = run(pipeline, "stages.md", **names)["y"]
    for got, want in zip(np.asarray(y), (x, 2 * x), strict=True):
        for block in blocks:
            want = want + moe(block, want, config).y
        assert jnp.allclose(got, want, atol=1e-4)


def shardings(mesh, specs):
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def test_fine_tuning(tmp_path):
    """Run: what is learned lowers the loss, and is the same in one block, merged, and in files."""
    step, files, _ = snippets("fine-tuning.md")
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, hidden_size=256)
    hf_config = QWEN3_EACH | sizes | dict(num_hidden_layers=1)
    config = expertmesh.flax_moe.hf.moe_config(hf_config, dtype="float32")
    params = expertmesh.flax_moe.init_params(jax.random.key(0), 256, config)
    given = dict(config=config, params=params, x=normal(4, 256), target=normal(4, 256))
    space = run(step, "fine-tuning.md", optax=optax, jnp=jnp, **given)
    with_lora, moe = expertmesh.flax_moe.with_lora, expertmesh.flax_moe.moe
    adapters, lora = space["adapters"], space["lora"]
    assert space["loss"](adapters) < space["value"]
    names = dict(adapters=adapters, lora=lora, hf_config=hf_config, folder=tmp_path)
    space = run(files, "fine-tuning.md", params=params, **names)
    jax.tree.map(np.testing.assert_array_equal, space["again"], adapters)
    got, want = (
        moe(p, normal(4, 256), config).y
        for p in (space["merged"], with_lora(params, adapters, lora))
    )
    assert jnp.allclose(got, want, atol=1e-5)


def test_upcycling():
    """Run: both blocks are the dense layer."""
    *_, code = snippets("fine-tuning.md")
    gate, up, down, x = normal(256, 512), -normal(256, 512), normal(512, 256), normal(4, 256)
    given = dict(gate_proj=gate / 16, up_proj=up / 16, down_proj=down / 16, x=x)
    space = run(code, "fine-tuning.md", jnp=jnp, **given)
    want = (jax.nn.silu(x @ gate / 16) * (x @ up / 16)) @ down / 16
    for y in space["same"]:
        assert jnp.linalg.norm(y - want) < 1e-6 * jnp.linalg.norm(want)


class Writer:
    """TensorBoard's and W&B's, as the page calls them."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, number):
        self.seen[name] = float(value)

    def add_histogram(self, name, value, number):
        self.seen[name] = np.asarray(value)

    def log(self, values, step):
        self.seen |= values

    def Histogram(self, np_histogram):
        return np_histogram


def test_watching_a_run():
    """Run: both loggers get what the block counted."""
    step, board, weights, bytes_sent, program = snippets("observability.md")
    config = expertmesh.flax_moe.MoEConfig(**SMALL, aux_loss_coeff=1e-2)
    params = expertmesh.flax_moe.init_params(jax.random.key(0), 256, config)
    given = dict(config=config, params=params, x=normal(4, 8, 256), jnp=jnp, np=np)
    space = run(step, "observability.md", **given)
    assert space["counts"].sum() == 64 and "tokens_per_expert" not in space["metrics"]
    named = {name: space[name] for name in ("metrics", "counts")} | {"number": 1}
    writer, wandb = Writer(), Writer()
    run(board, "observability.md", writer=writer, np=np, **named)
    run(weights, "observability.md", wandb=wandb, np=np, **named)
    assert writer.seen.keys() == wandb.seen.keys() >= {"moe/load", "moe/load_imbalance"}
    assert writer.seen["moe/load"].sum() == pytest.approx(1)
    exchange_bytes = expertmesh.flax_moe.exchange_bytes
    sent = run(bytes_sent, "observability.md", exchange_bytes=exchange_bytes, **named, **given)
    assert sent["metrics"]["exchange_bytes/dispatch"] == 3 * 32 * 256 * 2
    collectives = importlib.import_module("expertmesh.core.hlo").collectives
    run(program, "observability.md", step=space["step"], collectives=collectives, **given)


def test_no_page_is_left_out():
    """Those of the tutorial, the recipes and MaxText are of programs that other tests run."""
    pages = {page.name for page in DOCS.glob("*.md") if snippets(page.name)}
    here = {"core.md", "ep.md", "expert-parallelism.md", "quantization.md", "flax_moe.md"}
    here |= {"stages.md", "fine-tuning.md", "observability.md", "without-nvlink.md"}
    assert pages == here | {"tutorial.md", "recipes.md", "maxtext.md"}

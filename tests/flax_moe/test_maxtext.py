"""MaxText's own layers and training loop, with the experts of this library and without.

What is compared with is its dense path, which computes every expert for every token, drops nothing and knows nothing of
devices. Nothing is downloaded: the dataset is synthetic. Runs in the CI cell `maxtext`, which installs it.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText's word for: no Google Cloud

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import partitioning
from jax.sharding import Mesh

from cases.scripts import load_script
from expertmesh.core.testing import relative_error

maxtext = pytest.importorskip("maxtext")
layers = pytest.importorskip("maxtext.layers.moe")

from maxtext.layers.initializers import nd_dense_init  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from maxtext.utils import maxtext_utils  # noqa: E402
from maxtext.utils.sharding import create_sharding  # noqa: E402

import expertmesh.maxtext  # noqa: E402

pytestmark = [pytest.mark.maxtext, pytest.mark.default_jax]

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
TINY = {
    "run_name": "tiny",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
    "override_model_config": True,
    "steps": 3,
    "learning_rate": 1e-2,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1.0,
    "attention": "dot_product",
    "dtype": "float32",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_mlp_dim": 24,
    "base_moe_mlp_dim": 24,
    "load_balance_loss_weight": 0.01,
    "sparse_matmul": False,  # MaxText's dense path; the block does not ask
}
MIXTRAL = {"decoder_block": "mixtral", "base_num_decoder_layers": 2}
DEEPSEEK = {
    "model_name": "deepseek3-tiny",
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "routed_bias_update_rate": 0.01,
    "n_routing_groups": 4,
    "topk_routing_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
}
EP4_FSDP2 = {"ici_expert_parallelism": 4, "ici_fsdp_parallelism": 2}
EP2_FSDP2 = {"ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2}
EXPLICIT = {"shard_mode": "explicit"}


def make_config(folder, **options):
    options = TINY | {"base_output_directory": folder, "jax_cache_dir": ""} | options
    arguments = [f"{name}={value}" for name, value in options.items()]
    return train.initialize(["", str(BASE), *arguments])


@pytest.fixture
def config_of(tmp_path):
    return lambda **options: make_config(tmp_path, **options)[0]


class Block:
    """A routed layer of a config on its mesh, as a function of its parameters, its other variables and tokens."""

    def __init__(self, config, kind=None):
        devices = maxtext_utils.create_device_mesh(config)
        mode = jax.sharding.AxisType[config.shard_mode.name.capitalize()]
        self.config = config
        self.mesh = Mesh(devices, config.mesh_axes, axis_types=(mode,) * len(config.mesh_axes))
        with self.context():
            self.layer = (kind or layers.RoutedMoE)(
                config=config,
                num_experts=config.num_experts,
                num_experts_per_tok=config.num_experts_per_tok,
                mesh=self.mesh,
                kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
                kernel_axes=("embed", None),
                intermediate_dim=config.moe_mlp_dim,
                dtype=config.dtype,
                weight_dtype=config.weight_dtype,
                rngs=nnx.Rngs(0),
            )
        self.split()

    def split(self):
        """The layer's variables as they are now, laid out by MaxText's names of their dimensions."""
        self.graph, params, self.rest = nnx.split(self.layer, nnx.Param, ...)
        self.params = jax.tree.map(
            self.placed, params, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )

    def placed(self, variable):
        names = variable.get_metadata()["out_sharding"]
        return variable.replace(jax.device_put(variable[...], self.sharding(names)))

    def sharding(self, names):
        return create_sharding(self.mesh, names, rules=self.config.logical_axis_rules)

    def context(self):
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(self.mesh))
        stack.enter_context(partitioning.axis_rules(self.config.logical_axis_rules))
        return stack

    def as_tokens(self, array):
        features = "activation_embed" if array.shape[-1] == self.config.emb_dim else None
        names = ("activation_batch", "activation_norm_length", features)
        return jax.device_put(array, self.sharding(names[: array.ndim]))

    def run(self, inputs, **arguments):
        """y, the balance loss, the bias's part, and gradients in parameters, inputs and arguments of floats."""

        def loss(params, given):
            layer = nnx.merge(self.graph, params, self.rest, copy=True)
            y, balance, updates = layer(
                given["inputs"], **{k: v for k, v in given.items() if k != "inputs"}, **whole
            )
            total = jnp.sum(jnp.square(y.astype(jnp.float32)) * jnp.arange(1, y.shape[-1] + 1))
            return total + (0 if balance is None else 100 * balance), (y, balance, updates)

        given = {"inputs": inputs} | arguments
        given = {k: self.as_tokens(v) for k, v in given.items()}
        whole = {k: v for k, v in given.items() if not jnp.issubdtype(v.dtype, jnp.floating)}
        given = {k: v for k, v in given.items() if k not in whole}
        with self.context():
            call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
            (_, out), grads = call(self.params, given)
        return jax.tree.map(np.asarray, (out, nnx.to_pure_dict(grads[0]), grads[1]))


def tokens(config, seed=0):
    """[B, S, D] of varied magnitudes."""
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = (8, config.max_target_length, config.emb_dim)
    return jax.random.normal(keys[0], shape) * jnp.exp(jax.random.normal(keys[1], shape[:2] + (1,)))


def assert_same(got, want, tolerance=3e-6):
    """Leaf by leaf; the worst relative error."""
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    worst = 0.0
    for path, value in want.items():
        where = jax.tree_util.keystr(path)
        assert got[path].shape == value.shape and got[path].dtype == value.dtype, where
        if np.any(value):
            error = float(relative_error(got[path], value))
            assert error < tolerance, where
            worst = max(worst, error)
        else:
            assert not np.any(got[path]), where
    return worst


LAYERS = {
    "mixtral": MIXTRAL,
    "normalised-again": MIXTRAL | {"norm_topk_prob": True},
    "biases-of-gpt-oss": {
        "decoder_block": "gpt_oss",
        "mlp_bias": True,
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 1.0,
        "routed_bias": True,
    },
    "llama4": {"decoder_block": "llama4", "num_experts_per_tok": 1},
    "gemma4": {"decoder_block": "gemma4"},
    "deepseek": DEEPSEEK,
    "deepseek-all-groups": DEEPSEEK | {"n_routing_groups": -1},
    "deepseek-clamped": DEEPSEEK | {"mlp_activations_limit": 0.5},
    "megatron": DEEPSEEK | {"moe_use_megatron_seq_aux_loss": True},
    "counts": DEEPSEEK | {"gradient_accumulation_steps": 2},
    "prefused": MIXTRAL | {"prefuse_moe_weights": True},
    "no-loss": MIXTRAL | {"load_balance_loss_weight": 0.0},
    "experts-over-fsdp": MIXTRAL
    | {"shard_exp_on_fsdp": True, "ici_expert_parallelism": 1, "ici_fsdp_parallelism": 8},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_maxtexts(config_of, name):
    """Values, the balance loss, the bias's update or counts, and gradients in all parameters and in the tokens."""
    block = Block(config_of(**EP4_FSDP2 | LAYERS[name]))
    if block.layer.gate.bias is not None:
        bias = jax.random.normal(jax.random.key(3), (8,)) * 0.3
        block.layer.gate.bias[...] = bias
        block.split()
    x = tokens(block.config)
    want = block.run(x)
    with expertmesh.maxtext.installed():
        got = block.run(x)
    print(f"{name}: {assert_same(got, want):.1e}")
    y, balance, updates = got[0]
    assert np.any(y) and (balance is None) == (name == "no-loss")
    if name == "counts":
        assert updates.dtype == np.int32 and updates.sum() == x.shape[0] * x.shape[1] * 2
    elif LAYERS[name].get("model_name"):
        assert set(np.abs(updates).round(6)) <= {np.float32(0.01).round(6), 0}
    else:
        assert updates is None


def test_replayed_choices_and_other_inputs_of_the_gate(config_of):
    """`forced_routed_experts` with slots that are not used, `gate_inputs`, `out_sharding`."""
    block = Block(config_of(**EP4_FSDP2 | MIXTRAL))
    x = tokens(block.config)
    choices = jax.random.randint(jax.random.key(1), x.shape[:2] + (2,), 0, 4).at[..., 1].add(4)
    choices = choices.at[:, ::3, 1].set(-1).at[:, 5].set(-1)
    arguments = {"gate_inputs": tokens(block.config, 1), "forced_routed_experts": choices}
    want = block.run(x, **arguments)
    with expertmesh.maxtext.installed():
        assert_same(block.run(x, **arguments), want)
    assert not np.any(want[0][0][:, 5])


def test_hash_routing(config_of):
    """The first layers of DeepSeek-V4: experts by the table of token ids."""
    block = Block(
        config_of(**EP4_FSDP2 | DEEPSEEK), functools.partial(layers.RoutedMoE, is_hash_routing=True)
    )
    table = jnp.arange(64)[:, None] * jnp.array([1, 3]) % 8 + jnp.array([0, 0])
    table = jnp.stack([table[:, 0], (table[:, 0] + 1 + table[:, 1] % 7) % 8], 1)
    block.layer.tid2eid[...] = table.astype(jnp.float32)
    block.split()
    x = tokens(block.config)
    ids = jax.random.randint(jax.random.key(1), x.shape[:2], 0, 64)
    want = block.run(x, input_ids=ids)
    with expertmesh.maxtext.installed():
        assert_same(block.run(x, input_ids=ids), want)
    assert want[0][1:] == (None, None)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_spare_experts_level_what_small_buffers_drop(config_of, traced, mode):
    """Every token chooses the two experts of one rank of four: buffers of the even share hold a quarter of the rows."""
    block = Block(config_of(**EP4_FSDP2 | MIXTRAL, shard_mode=mode))
    x = tokens(block.config)
    choices = jnp.broadcast_to(jnp.arange(2), x.shape[:2] + (2,))
    want = Block(config_of(**EP4_FSDP2 | MIXTRAL)).run(x, forced_routed_experts=choices)
    dropless = [
        {"num_spare_experts": 1},  # the even share
        {"num_spare_experts": 1, "capacity_factor": 2.0},
        {"capacity_factor": 4.0},
    ]
    for options in dropless:
        with expertmesh.maxtext.installed(**options):
            assert_same(block.run(x, forced_routed_experts=choices), want)
        config = traced.pop()[2]
        assert {name: getattr(config, name) for name in options} == options
    with expertmesh.maxtext.installed(capacity_factor=1.0):
        (y, _, _), *_ = block.run(x, forced_routed_experts=choices)
    # Rows of the first expert come first: in each of two groups 32 tokens have that alone, and 32 nothing.
    assert np.all(y == 0, axis=-1).sum() == 64
    assert float(relative_error(y, want[0][0])) > 0.1


MESHES = {
    "ep-fsdp": (EP4_FSDP2, ("fsdp", ("expert",), False)),
    "context": (
        EP2_FSDP2 | {"ici_context_parallelism": 2},
        (("fsdp", "context"), ("expert",), False),
    ),
    "tensor": (EP2_FSDP2 | {"ici_tensor_parallelism": 2}, ("fsdp", ("expert",), False)),
    "data": (EP2_FSDP2 | {"ici_data_parallelism": 2}, ("fsdp", ("expert",), False)),
    "fsdp_transpose": (
        EP2_FSDP2 | {"ici_fsdp_transpose_parallelism": 2},
        ("fsdp", ("expert",), False),
    ),
    "fsdp": ({"ici_fsdp_parallelism": 8}, ("fsdp", None, False)),
    "experts-over-fsdp": (
        {"ici_fsdp_parallelism": 8, "shard_exp_on_fsdp": True},
        ("fsdp", None, True),
    ),
    "rule-of-its-own": (
        EP2_FSDP2 | {"ici_fsdp_parallelism": 4, "custom_mesh_and_rule": "shard-exp-on-fsdp"},
        ("fsdp", ("expert",), True),
    ),
    "context-as-experts": (
        EP2_FSDP2 | {"ici_context_parallelism": 2, "custom_mesh_and_rule": "cp-as-ep"},
        ("fsdp", ("context", "expert"), False),
    ),
}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("name", MESHES)
def test_roles_are_derived_from_the_rules(config_of, name, mode):
    """And the layer is MaxText's there."""
    options, (fsdp, ep, by_expert) = MESHES[name]
    block = Block(config_of(**MIXTRAL | options, shard_mode=mode))
    with block.context():
        layout = expertmesh.maxtext.layout_of(block.layer)
    assert layout.resource.fsdp_resource == fsdp
    assert (layout.ep_axis, layout.shard_exp_on_fsdp) == (ep, by_expert)
    assert layout.resource.tp_resource == (name if name in ("tensor", "fsdp_transpose") else None)
    assert layout.resource.dp_resource == (name if name == "data" else None)
    assert layout == expertmesh.maxtext.layout_of(block.layer)  # of the config's rules
    x = tokens(block.config)
    want = Block(config_of(**MIXTRAL | options)).run(x)
    with expertmesh.maxtext.installed():
        assert_same(block.run(x), want)


def test_a_mesh_that_splits_weights_otherwise_is_refused(config_of):
    options = {"custom_mesh_and_rule": "shard-exp-on-fsdp", "ici_context_parallelism": 2}
    block = Block(config_of(**MIXTRAL | EP2_FSDP2 | options))
    with pytest.raises(
        ValueError, match="logical_axis_rules must .* got E over .*'fsdp'.* D over .*'context'"
    ):
        expertmesh.maxtext.layout_of(block.layer)


REFUSED = {
    "capacity_factor": 1.25,
    "ragged_buffer_factor": 1.5,
    "quantization": "fp8",
    "moe_quantize_combine_bwd_method": "rowwise",
    "te_moe_block": True,
    "use_batch_split_schedule": True,
    "use_2d_fsdp_sharding": True,
    "matmul_precision": "highest",
    "attention": "vllm_rpa",
    "enable_diloco": True,
    "moe_log_max_load_ratio": True,
}


class Changed:
    """A config, but for some fields; MaxText's own checks of their combinations are not of interest."""

    def __init__(self, config, **fields):
        self.config, self.fields = config, fields

    def __getattr__(self, name):
        return self.fields[name] if name in self.fields else getattr(self.config, name)


def test_what_changes_results_is_refused_by_name(config_of):
    config = config_of(**MIXTRAL | EP4_FSDP2)
    for field, value in REFUSED.items():
        changed = Changed(config, **{field: value})
        with expertmesh.maxtext.installed(), pytest.raises(ValueError) as error:
            layers.RoutedMoE(config=changed)
        assert f"{field} must be " in str(error.value) and f"got {field}={value!r}; " in str(
            error.value
        )
        with pytest.raises(ValueError, match=f"got {field}="):
            expertmesh.maxtext.RoutedMoE(config=changed)
    block = Block(config)
    block.layer.config = Changed(config, mlp_activations=["tanh", "linear"])
    with (
        block.context(),
        expertmesh.maxtext.installed(),
        pytest.raises(ValueError, match="got mlp_activations="),
    ):
        block.layer(tokens(config))


def test_the_public_list():
    names = {"Layout", "RoutedAndSharedMoE", "RoutedMoE", "installed", "layout_of"}
    assert set(expertmesh.maxtext.__all__) == names
    assert all(getattr(expertmesh.maxtext, name).__doc__ for name in names)


def test_it_leaves_nothing_behind():
    before = layers.RoutedMoE.__init__, layers.RoutedMoE.__call__
    with pytest.raises(KeyError), expertmesh.maxtext.installed(num_chunks=2):
        assert layers.RoutedMoE.__call__ is not before[1]
        raise KeyError
    assert (layers.RoutedMoE.__init__, layers.RoutedMoE.__call__) == before
    with pytest.raises(ValueError, match="options must be of recipe, .* got top_k"):
        with expertmesh.maxtext.installed(top_k=2):
            pass
    assert (layers.RoutedMoE.__init__, layers.RoutedMoE.__call__) == before


def test_the_classes_have_maxtexts_parameters(config_of, traced):
    """Names, shapes, initial values and shardings; and compute the same, with shared experts too."""
    config = config_of(**DEEPSEEK | EP4_FSDP2)
    theirs, ours = Block(config), Block(config, expertmesh.maxtext.RoutedMoE)

    def described(block):
        return [
            (jax.tree_util.keystr(path), np.asarray(v[...]), v.get_metadata())
            for path, v in jax.tree_util.tree_leaves_with_path(
                nnx.state(block.layer, nnx.Not(nnx.RngState)),
                is_leaf=lambda x: isinstance(x, nnx.Variable),
            )
        ]

    for mine, want in zip(described(ours), described(theirs), strict=True):
        assert mine[0] == want[0] and mine[2] == want[2]
        np.testing.assert_array_equal(mine[1], want[1])
    x = tokens(config)
    assert_same(ours.run(x), theirs.run(x))

    def shared(kind):
        return lambda num_experts, num_experts_per_tok, intermediate_dim, **rest: kind(**rest)

    theirs = Block(config, shared(layers.RoutedAndSharedMoE))
    ours = Block(config, shared(expertmesh.maxtext.RoutedAndSharedMoE))
    assert type(ours.layer).__mro__[1] is layers.RoutedAndSharedMoE
    traced.clear()
    assert_same(ours.run(x), theirs.run(x))
    assert [args[2].num_chunks for args in traced] == [1]

    class InParts(expertmesh.maxtext.RoutedAndSharedMoE):
        expert_options = {"num_chunks": 2}

    assert_same(Block(config, shared(InParts)).run(x), theirs.run(x))
    assert [args[2].num_chunks for args in traced] == [1, 2]


def trained(folder, **options):
    """Losses and balance losses of the steps, and the model's variables at the end."""
    config, recorder = make_config(folder, metrics_file=folder / "metrics", **options)
    state = train.train_loop(config, recorder)
    rows = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]
    losses = [[row["learning/loss"], row["learning/moe_lb_loss"]] for row in rows]
    variables = nnx.to_pure_dict(nnx.state(state.model, nnx.Not(nnx.RngState)))
    return np.array(losses), jax.tree.map(np.asarray, variables)


JOBS = {
    "mixtral": MIXTRAL | EP4_FSDP2,
    "mixtral-explicit": MIXTRAL | EP4_FSDP2 | EXPLICIT,
    "mixtral-tensor": MIXTRAL | EP2_FSDP2 | {"ici_tensor_parallelism": 2},
    "deepseek": DEEPSEEK | EP4_FSDP2,
    "deepseek-explicit": DEEPSEEK | EP4_FSDP2 | EXPLICIT,
    "deepseek-accumulates": DEEPSEEK | EP4_FSDP2 | {"gradient_accumulation_steps": 2},
    "deepseek-accumulates-explicit": DEEPSEEK
    | EP4_FSDP2
    | EXPLICIT
    | {"gradient_accumulation_steps": 2},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A job of MaxText's own, over Auto axes: its dense path has no layout over Explicit ones."""
    done = {}

    def run(**options):
        options["shard_mode"] = "auto"
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            done[key] = trained(tmp_path_factory.mktemp("dense"), **options)
        return done[key]

    return run


@pytest.fixture
def traced(monkeypatch):
    """The calls of the block, as programs are traced."""
    calls, block = [], expertmesh.maxtext.layers.moe

    def counted(*args, **kwargs):
        calls.append(args)
        return block(*args, **kwargs)

    monkeypatch.setattr(expertmesh.maxtext.layers, "moe", counted)
    return calls


def biases(variables):
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return [v for path, v in leaves if jax.tree_util.keystr(path).endswith("['gate']['bias']")]


@pytest.mark.parametrize("name", JOBS)
def test_training_is_maxtexts(dense, traced, tmp_path, name):
    """Three steps of its loop over scanned layers: losses, balance losses, biases, and every parameter."""
    want, variables = dense(**JOBS[name])
    assert not traced
    with expertmesh.maxtext.installed():
        got, mine = trained(tmp_path, **JOBS[name])
    assert traced
    worst = np.max(np.abs(got - want) / want)
    print(f"{name}: losses {worst:.1e}")
    assert got.shape == (3, 2) and worst < 1e-6
    assert want[-1, 0] < want[0, 0]
    assert len(biases(mine)) == ("deepseek" in name)
    for bias, theirs in zip(biases(mine), biases(variables), strict=True):
        np.testing.assert_array_equal(bias, theirs)
        assert bias.shape == (2, 8) and np.ptp(bias) >= 0.02
    assert_same(mine, variables, 1e-3)  # Adam divides by roots of small numbers


def test_training_with_spare_experts(dense, traced, tmp_path):
    """In buffers that hold any routing: the losses of MaxText's, by copies of hot experts' weights in each step."""
    job = JOBS["mixtral"]
    want, variables = dense(**job)
    with expertmesh.maxtext.installed(num_spare_experts=2, capacity_factor=4.0):
        got, mine = trained(tmp_path, **job)
    worst = np.max(np.abs(got - want) / want)
    print(f"spare experts: losses {worst:.1e}")
    assert {args[2].num_spare_experts for args in traced} == {2} and worst < 1e-6
    assert_same(mine, variables, 1e-3)


def test_scanned_trees_of_jobs(dense):
    """The recipe's functions take what a job of MaxText has, and give it back."""
    recipes = load_script(ROOT / "examples/recipes.py")
    _, variables = dense(**JOBS["deepseek"])
    tree = variables["decoder"]["moe_layers"]["DeepSeekMoeBlock_0"]
    params, bias = recipes.from_maxtext_layers(tree)
    assert params["wi"].shape == (2, 8, 32, 2, 24) and bias.shape == (2, 8)
    np.testing.assert_array_equal(params["wi"][1, :, :, 1], tree["MoeBlock_0"]["wi_1"][:, 1])
    np.testing.assert_array_equal(
        params["shared_wo"][1], tree["shared_experts"]["wo"]["kernel"][:, 1]
    )
    np.testing.assert_array_equal(bias, tree["MoeBlock_0"]["gate"]["bias"])
    jax.tree.map(np.testing.assert_array_equal, recipes.to_maxtext_layers(params, bias), tree)


def test_the_example_of_the_page_trains(capsys, monkeypatch):
    example = load_script(ROOT / "examples/maxtext_mixtral.py")
    monkeypatch.setattr("sys.argv", ["", "steps=3"])
    example.main()
    losses = [
        float(x) for x in re.findall(r"^step \d: loss ([\d.]+)", capsys.readouterr().out, re.M)
    ]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_its_checkpoint_is_read_unchanged(tmp_path):
    """Saved by MaxText after two steps, continued by the block, then by MaxText: the same losses."""
    options = MIXTRAL | EP4_FSDP2 | {"async_checkpointing": False, "checkpoint_period": 2}
    options |= {"enable_checkpointing": True, "learning_rate_schedule_steps": 4}
    trained(tmp_path, **options, steps=3)
    saved = sorted(path.name for path in (tmp_path / "tiny/checkpoints").iterdir())
    assert "2" in saved
    for name in ("ours", "theirs"):
        shutil.copytree(tmp_path / "tiny", tmp_path / name / "tiny")
    with expertmesh.maxtext.installed():
        got, _ = trained(tmp_path / "ours", **options, steps=4)
    want, _ = trained(tmp_path / "theirs", **options, steps=4)
    assert len(got) == len(want) < 3
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_a_recipe(dense, tmp_path, recipe):
    """Experts in 8 bits, in MaxText's loop: near the losses of float32, and not those."""
    job = MIXTRAL | {"ici_expert_parallelism": 8, "base_mlp_dim": 32, "base_moe_mlp_dim": 32}
    want, _ = dense(**job)
    with expertmesh.maxtext.installed(recipe=recipe):
        got, _ = trained(tmp_path, **job)
    worst = np.max(np.abs(got - want) / want)
    print(f"{recipe}: losses {worst:.1e}")
    assert 1e-6 < worst < 1e-2


def test_the_page_runs(tmp_path):
    """docs/maxtext.md, block after block, in one namespace."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/maxtext.md").read_text(), re.DOTALL | re.MULTILINE
    )
    options = TINY | MIXTRAL | EP2_FSDP2 | {"ici_fsdp_parallelism": 4, "steps": 2}
    options |= {
        "base_output_directory": tmp_path,
        "base_moe_mlp_dim": 32,
        "base_mlp_dim": 32,
        "jax_cache_dir": "",
    }
    options |= {"metrics_file": tmp_path / "metrics"}
    names = {"base_yml": str(BASE), "options": [f"{k}={v}" for k, v in options.items()]}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and len((tmp_path / "metrics").read_text().splitlines()) >= 2

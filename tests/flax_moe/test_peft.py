"""Files of PEFT's own: adapters that one of us writes, the other reads, and the sums of both are the same weights.

The model is experts of `torch.nn.Linear` under Hugging Face's names, as adapters per expert are trained. Nothing is
downloaded. Runs in the CI cell `transformers`, which installs PEFT and torch.
"""

import jax
import pytest

from expertmesh.core.testing import relative_error
from expertmesh.flax_moe import LoRA, hf, init_lora, init_params, merge_lora, peft
from flax_moe.hf_oracle import QWEN3_EACH

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("peft")

pytestmark = [pytest.mark.transformers, pytest.mark.default_jax]

CONFIG = QWEN3_EACH | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LORA = LoRA(rank=4, alpha=6.0, targets=("wi", "wo"))


def torch_model(weights):
    """Modules of the weights' names, of which PEFT adapts those that it is told to."""
    root = torch.nn.Module()
    for name, array in weights.items():
        *path, last = name.removesuffix(".weight").split(".")
        at = root
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        linear = torch.nn.Linear(array.shape[1], array.shape[0], bias=False)
        linear.weight.data = torch.from_numpy(array.copy())
        at.add_module(last, linear)
    return root


@pytest.fixture
def layers():
    """(parameters, adapters) of each layer, B not zeros; and the model's weights."""
    made, weights, config = [], {}, hf.moe_config(CONFIG)
    for layer in range(2):
        keys = jax.random.split(jax.random.key(layer), 2)
        params = init_params(keys[0], 16, config)
        adapters = jax.tree.map(lambda x: x + 0.25, init_lora(keys[1], 16, config, LORA))
        made.append((params, adapters))
        weights |= hf.export_layer(params, CONFIG, layer)
    return made, weights


def assert_merged(model, layers, loras):
    got = {name: x.numpy() for name, x in model.merge_and_unload().state_dict().items()}
    for layer, (params, adapters) in enumerate(layers):
        want = hf.export_layer(merge_lora(params, adapters, loras), CONFIG, layer)
        for name, w in want.items():
            assert relative_error(got[name], w) < 1e-6, name


def test_peft_reads_what_we_write(layers, tmp_path):
    made, weights = layers
    tensors = {}
    for layer, (_, adapters) in enumerate(made):
        tensors |= peft.export_adapters(adapters, CONFIG, layer, LORA)
    peft.write_adapters(tmp_path, tensors, peft.adapter_config(LORA, CONFIG, task_type=None))
    model = theirs.PeftModel.from_pretrained(torch_model(weights), tmp_path)
    names = {name for name in model.state_dict() if ".lora_" in name}
    assert len(names) == len(tensors)
    assert_merged(model, made, LORA)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
def test_we_read_what_peft_writes(layers, tmp_path, options):
    made, weights = layers
    config = theirs.LoraConfig(
        r=3, lora_alpha=5, target_modules=["gate_proj", "up_proj", "down_proj"], **options
    )
    model = theirs.get_peft_model(torch_model(weights), config)
    torch.manual_seed(0)
    for name, x in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(x)
    model.save_pretrained(tmp_path)
    read, found = peft.read_adapters(tmp_path)
    lora = peft.lora_config(found, CONFIG)
    assert lora.rank == 3 and lora.targets == ("wi", "wo")
    loaded = [peft.load_adapters(read, CONFIG, layer, lora) for layer in range(2)]
    pairs = [(params, adapters) for (params, _), adapters in zip(made, loaded, strict=True)]
    assert_merged(model, pairs, lora)

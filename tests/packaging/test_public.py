"""The public surface: adding or removing a name is a decision, taken here and in the changelog."""

import dataclasses
import importlib
import inspect
import sys

import pytest

PUBLIC = {
    "expertmesh.core": """ACTIVATIONS Activation Adapted DelayedScaling DelayedState DenseRouting DenseState
        Float8BlockScaling Float8CurrentScaling Format Kernel KernelError LayerFormats MXFP8BlockScaling MeshResource
        NVFP4BlockScaling Op PermutePlan Plan QuantizedArray QuantizedWeight Query RECIPES
        ROUTING_MAP_FORMATS RaggedParams Recipe RouterConfig RouterStatistics Routing RowMap SCORE_FUNCTIONS
        TensorFormat accumulate_gradient activate as_recipe autocast current_recipe
        current_resource dense dequantize differentiable expert_counts from_routing_map gated_activation
        gather_weight gathered_gemm gemm global_shard_guard grouped_dense grouped_gemm grouped_quantize
        grouped_quantize_delayed init_delayed init_dense_state is_supported load_balance_loss
        local_permute_after_a2a local_unpermute_before_a2a missing_rows move_rows move_values padded_rows
        padded_rows_sharded permute plan_chunks plan_permute plan_permute_map probs_to_topk_weights
        quantile_expert_bias quantize quantize_dbias quantize_delayed quantize_weight ragged_params
        required_alignment required_bias_histogram route route_map router_statistics router_z_loss
        sequence_balance_loss shard_rows sort_chunks specs to_routing_map topk_weights_to_probs unpermute
        update_expert_bias""",
    "expertmesh.ep": """Balanced Copies CopyPlan EpConfig EpGroup Handle Overflow balance bootstrap
        combine copy_experts dispatch dispatch_weights find_overflow is_supported
        least_rows_of_a_copy plan_copies prepare raise_overflow raise_stall recv_capacity wait_for""",
    "expertmesh.flax_moe": """CHECKPOINT_NAMES LoRA LogicalAxes MoEConfig MoEOutput NativeMoEBlock REMAT_POLICIES
        checkpoint exchange_bytes hf init_lora init_params init_quant_state is_supported linen lora_shapes lora_specs
        merge_lora merge_wi moe native_moe nnx param_shapes param_specs peft permute_experts place_experts
        quantize_weights split_wi stages upcycle with_lora""",
    "expertmesh.convert": "main",
    "expertmesh.train": "main",
    "expertmesh.report": "main",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_list(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_documented(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{package}.{name} has no docstring"


def functions(value, name: str):
    """(name, function): of a function itself, of a class its public methods, of a module what it lists."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for key, method in vars(value).items():
            if inspect.isfunction(method) and not key.startswith("_"):
                yield f"{name}.{key}", method
    elif inspect.ismodule(value):
        for key in getattr(value, "__all__", ()):
            yield from functions(getattr(value, key), f"{name}.{key}")


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_function_has_types(package):
    untyped = []
    for name, function in functions(importlib.import_module(package), package):
        signature = inspect.signature(function)
        given = {p.name: p.annotation for p in signature.parameters.values()} | {
            "return": signature.return_annotation
        }
        missing = [key for key, x in given.items() if x is inspect.Signature.empty]
        if left := set(missing) - {"self", "cls"}:
            untyped.append((name, sorted(left)))
    assert not untyped


def test_what_needs_maxtext_says_so(monkeypatch):
    """Its public names are in the tests of the cell `maxtext`."""
    monkeypatch.setitem(sys.modules, "maxtext", None)
    monkeypatch.delitem(sys.modules, "expertmesh.maxtext", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match="must be installed; got .*maxtext.*; pip install maxtext=="
    ):
        importlib.import_module("expertmesh.maxtext")


def test_the_fields_of_the_mesh_resource():
    fields = [
        field.name
        for field in dataclasses.fields(importlib.import_module("expertmesh.core").MeshResource)
    ]
    assert fields == [f"{role}_resource" for role in ("dp", "fsdp", "tp", "tpsp", "ep", "pp", "cp")]

"""The op abstraction, mesh roles, and the ops of a Mixture-of-Experts block."""

__version__ = "0.1.0"

from expertmesh.core import specs
from expertmesh.core.features import is_supported
from expertmesh.core.linear.adapted import Adapted
from expertmesh.core.linear.dense import dense
from expertmesh.core.linear.gathered_gemm import gathered_gemm
from expertmesh.core.linear.gemm import gemm
from expertmesh.core.linear.grouped_dense import grouped_dense
from expertmesh.core.linear.grouped_gemm import grouped_gemm
from expertmesh.core.linear.layer import DenseState, init_dense_state
from expertmesh.core.linear.quantize_weight import QuantizedWeight, quantize_weight
from expertmesh.core.mesh import MeshResource, current_resource, global_shard_guard
from expertmesh.core.op import Kernel, Op, Plan, Query
from expertmesh.core.ops.accumulate_gradient import accumulate_gradient
from expertmesh.core.ops.activation import (
    ACTIVATIONS,
    Activation,
    activate,
    gated_activation,
)
from expertmesh.core.ops.gather_weight import gather_weight
from expertmesh.core.ops.permute import (
    PermutePlan,
    padded_rows,
    padded_rows_sharded,
    permute,
    plan_permute,
    shard_rows,
    unpermute,
)
from expertmesh.core.ops.row_map import RowMap, move_rows, move_values
from expertmesh.core.quantization.delayed_scaling import (
    DelayedState,
    grouped_quantize_delayed,
    init_delayed,
    quantize_delayed,
)
from expertmesh.core.quantization.quantize import dequantize, quantize, quantize_dbias
from expertmesh.core.quantization.quantize_rows import grouped_quantize
from expertmesh.core.quantization.quantized import QuantizedArray
from expertmesh.core.quantization.recipe import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    LayerFormats,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    TensorFormat,
    as_recipe,
    autocast,
    current_recipe,
    required_alignment,
)
from expertmesh.core.router.balance import (
    expert_counts,
    load_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from expertmesh.core.router.expert_bias import (
    quantile_expert_bias,
    required_bias_histogram,
    update_expert_bias,
)
from expertmesh.core.router.route import SCORE_FUNCTIONS, RouterConfig, Routing, route
from expertmesh.core.router.statistics import RouterStatistics, router_statistics
from expertmesh.core.support import KernelError
from expertmesh.core.te_compat.permute_map import plan_permute_map
from expertmesh.core.te_compat.ragged_params import (
    RaggedParams,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    missing_rows,
    ragged_params,
)
from expertmesh.core.te_compat.route_map import DenseRouting, route_map
from expertmesh.core.te_compat.routing_map import (
    ROUTING_MAP_FORMATS,
    from_routing_map,
    to_routing_map,
)
from expertmesh.core.te_compat.sort_chunks import plan_chunks, sort_chunks
from expertmesh.core.te_compat.topk_weights import (
    probs_to_topk_weights,
    topk_weights_to_probs,
)
from expertmesh.core.vjp import differentiable

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Adapted",
    "DelayedScaling",
    "DelayedState",
    "DenseRouting",
    "DenseState",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Kernel",
    "KernelError",
    "LayerFormats",
    "MXFP8BlockScaling",
    "MeshResource",
    "NVFP4BlockScaling",
    "Op",
    "PermutePlan",
    "Plan",
    "QuantizedArray",
    "QuantizedWeight",
    "Query",
    "RECIPES",
    "ROUTING_MAP_FORMATS",
    "RaggedParams",
    "Recipe",
    "RouterConfig",
    "RouterStatistics",
    "Routing",
    "RowMap",
    "SCORE_FUNCTIONS",
    "TensorFormat",
    "accumulate_gradient",
    "activate",
    "as_recipe",
    "autocast",
    "current_recipe",
    "current_resource",
    "dense",
    "dequantize",
    "differentiable",
    "expert_counts",
    "from_routing_map",
    "gated_activation",
    "gather_weight",
    "gathered_gemm",
    "gemm",
    "global_shard_guard",
    "grouped_dense",
    "grouped_gemm",
    "grouped_quantize",
    "grouped_quantize_delayed",
    "init_delayed",
    "init_dense_state",
    "is_supported",
    "load_balance_loss",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "missing_rows",
    "move_rows",
    "move_values",
    "padded_rows",
    "padded_rows_sharded",
    "permute",
    "plan_chunks",
    "plan_permute",
    "plan_permute_map",
    "probs_to_topk_weights",
    "quantile_expert_bias",
    "quantize",
    "quantize_dbias",
    "quantize_delayed",
    "quantize_weight",
    "ragged_params",
    "required_alignment",
    "required_bias_histogram",
    "route",
    "route_map",
    "router_statistics",
    "router_z_loss",
    "sequence_balance_loss",
    "shard_rows",
    "sort_chunks",
    "specs",
    "to_routing_map",
    "topk_weights_to_probs",
    "unpermute",
    "update_expert_bias",
]

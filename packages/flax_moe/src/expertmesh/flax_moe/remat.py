"""What a MoE block keeps for its backward, and the names of these values for your own policies.

Each value has the names that MaxText's and levanter's blocks give to it, so a policy
`jax.checkpoint_policies.save_only_these_names(...)` for those blocks works for this one.

Dimension key: P participants, C receive rows per participant, D model width, F expert width.
"""

from collections.abc import Callable

import jax

from expertmesh.core.quantization import quantized

__all__ = ["CHECKPOINT_NAMES", "REMAT_POLICIES", "named", "rematerialized"]

CHECKPOINT_NAMES = {
    "dispatched": ("grug_moe_dispatch_input",),
    "hidden": ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1", "grug_moe_expert_hidden"),
    "expert_output": ("mlpwo", "moe_mlpwo", "grug_moe_dispatch_output"),
    "combined": ("grug_moe_output",),
    "quantized_x": ("quantized_x",),
    "quantized_weight": ("quantized_weight",),
}
"""The names of each value that a block names:

| value | what it is |
|---|---|
| dispatched | what came from other devices: rows [P, C, D] or data and scales (all here: tokens'), weights, integers |
| hidden | the result of the up projection, [P, C, 2, F] |
| expert_output | the result of the down projection, [P, C, D], which no backward reads |
| combined | the weighted sum, [..., D] |
| quantized_x | under a recipe: what each GEMM keeps of its rows, data and scales |
| quantized_weight | under a recipe: what it keeps of its weight, this device's shard, data and scales |
"""

REMAT_POLICIES = {
    "save_all": None,
    "save_8_bits": None,
    "save_min": jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES["dispatched"]),
    "recompute": jax.checkpoint_policies.nothing_saveable,
}
"""Policies of `MoEConfig.remat`, all but "save_8_bits" with equal gradients:

| policy | kept besides parameters and tokens | done again in the backward |
|---|---|---|
| save_all | whatever the backward reads | nothing; on one device, if F is small, the order of the rows |
| save_8_bits | the same, hidden as 8 bits, in blocks with scales | the activation, from those 8 bits |
| save_min | what came from other devices | the experts' GEMMs and activation, no communication but weight gathers |
| recompute | nothing | also the exchange of the tokens |

"save_8_bits" halves what most of a layer's memory holds. Its gradients see the hidden layer rounded to E4M3, as FP8
recipes round operands; the result is the same.

Constants: a policy made anew for each call would be traced anew.
"""


def named[Tree](value: str, tree: Tree) -> Tree:
    """The arrays of a pytree, under every name of a key of `CHECKPOINT_NAMES`."""
    return quantized.named(tree, CHECKPOINT_NAMES[value])


def rematerialized[**P, Out](
    function: Callable[P, Out], static_argnums: tuple[int, ...]
) -> dict[str, Callable[P, Out]]:
    """`function` under each of `REMAT_POLICIES`, jitted so that a repeated call is not traced again."""
    versions: dict[str, Callable[P, Out]] = {}
    for remat, policy in REMAT_POLICIES.items():
        version = function
        if policy is not None:
            version = jax.checkpoint(function, policy=policy, static_argnums=static_argnums)
        versions[remat] = jax.jit(version, static_argnums=static_argnums)
    return versions

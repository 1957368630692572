"""Our own names in a checkpoint: a parameter is one array, as the tree of `init_params` has it.

    {prefix}layers.{i}.moe.{gate_kernel, wi, wo, shared_wi, shared_wo, expert_bias}

and beside one of 8 bits its scales, by the law of `fp8_blocks`: of `wi` [E, D, 2, F] they are [E, D / 128, 2, F / 128].
"""

from collections.abc import Mapping
from typing import Any

from expertmesh.flax_moe import hf
from expertmesh.flax_moe.models.places import Layout, Place

__all__ = ["any_layout", "own_layout"]


def own_layout(hf_config: Mapping[str, Any], layer: int, *, prefix: str = "model.") -> Layout:
    """Of one decoder layer under our names; the arguments are those of `hf.layer_layout`."""
    theirs = hf.layer_layout(hf_config, layer, prefix=prefix)
    block = f"{prefix}layers.{layer}.moe."
    places = tuple(
        Place(block + param, param, (slice(None),) * len(shape), transposed=False)
        for param, shape in theirs.params.items()
    )
    bias = Place(f"{block}expert_bias", "expert_bias", (slice(None),), transposed=False)
    return Layout(
        block=block,
        places=places,
        params=theirs.params,
        matrices=theirs.matrices,
        bias=bias if theirs.bias else None,
    )


def any_layout(
    weights: Mapping[str, Any], hf_config: Mapping[str, Any], layer: int, *, prefix: str = "model."
) -> Layout:
    """The layout that the weights have: ours, or what `hf.find_layout` finds.

    Raises:
      ValueError: names that are missing.
    """
    layout = own_layout(hf_config, layer, prefix=prefix)
    if not any(name in weights for name in layout.shapes):
        return hf.find_layout(weights, hf_config, layer, prefix=prefix)
    hf.check_there(weights, layout, layer)
    return layout

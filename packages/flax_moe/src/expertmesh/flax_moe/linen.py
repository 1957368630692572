"""The MoE block as a Flax Linen module: parameters and their logical axes, nothing else."""

import flax.linen as nn
import jax

from expertmesh.flax_moe.config import MoEConfig, MoEOutput
from expertmesh.flax_moe.moe import moe
from expertmesh.flax_moe.params import LogicalAxes, initializers, param_shapes

__all__ = ["MoEBlock"]


class MoEBlock(nn.Module):
    """`expertmesh.flax_moe.moe` with its parameters in the collection "params", under the names of `init_params`.

    Attributes:
      config: see MoEConfig.
      logical_axes: names for `flax.linen.LogicallyPartitioned`; None: plain arrays.

    The call returns the whole MoEOutput: add its losses to yours. Nothing is sown; `capture_intermediates` finds it.
    """

    config: MoEConfig
    logical_axes: LogicalAxes | None = LogicalAxes()

    @nn.compact
    def __call__(self, x: jax.Array) -> MoEOutput:
        """See `moe`; x is float[..., D]."""
        shapes = param_shapes(x.shape[-1], self.config)
        params = {
            name: self.param(name, self._init(name), shape, self.config.param_dtype)
            for name, shape in shapes.items()
        }
        return moe(params, x, self.config)

    def _init(self, name):
        init = initializers()[name]
        if self.logical_axes is None:
            return init
        return nn.with_logical_partitioning(init, self.logical_axes.of(name))

"""A layer as a checkpoint stores it: parts of its parameters, in 16 bits and more or in blocks of 8 bits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from expertmesh.flax_moe import hf
from expertmesh.flax_moe.models import fp8_blocks
from expertmesh.flax_moe.models.fp8_blocks import Block
from expertmesh.flax_moe.models.places import Layout, Place, Ranges, Slices, assemble

__all__ = ["StoredLayer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """Reads no more than what is asked for.

    Attributes:
      weights: name -> array; see `hf.load_layer`.
      hf_config: of the model.
      layout: of the layer in these weights.
      dtype: of what is given in 16 bits and more; None: each array's own, bfloat16 where it is stored in 8 bits.
    """

    weights: Mapping[str, Any]
    hf_config: Mapping[str, Any]
    layout: Layout
    dtype: DTypeLike | None = None

    def check(self) -> None:
        """Raises the errors of reading, without reading anything but scales."""
        for name, shape in self.layout.shapes.items():
            hf.check_shape(name, np.shape(self.weights[name]), shape)
            hf.check_float(name, self.weights[name].dtype)
            if self.weights[name].dtype.itemsize == 1:
                hf.read_scale(self.weights, self.hf_config, self.layout, name)

    def dtype_of(self, param: str) -> np.dtype:
        """Of what `values` gives."""
        if self.dtype is not None:
            return np.dtype(self.dtype)
        name = self.layout.places_of(param)[0].name
        stored: np.dtype = np.dtype(self.weights[name].dtype)
        return np.dtype(jnp.bfloat16) if stored.itemsize == 1 else stored

    def is_fp8(self, param: str) -> bool:
        """Whether all arrays of a parameter are stored in 8 bits.

        Raises:
          ValueError: only some are.
        """
        names = {
            self.weights[place.name].dtype.itemsize == 1: place.name
            for place in self.layout.places_of(param)
        }
        if len(names) == 2:
            raise ValueError(
                f"checkpoint: the arrays of {param} must all have 8 bits to be kept so, or none; got {names[True]} "
                f"with 8 bits and {names[False]} with more; load it without keep_fp8"
            )
        return True in names

    def values(self, param: str, ranges: Ranges) -> np.ndarray:
        """Part of a parameter, dequantized where it is stored in 8 bits."""
        return hf.read_param(
            self.weights, self.hf_config, self.layout, param, ranges, dtype=self.dtype
        )

    def data(self, param: str, ranges: Ranges) -> np.ndarray:
        """Part of a parameter's 8 bits."""
        return assemble(
            self.layout.places_of(param), ranges, lambda name, i: np.asarray(self.weights[name][i])
        )

    def scale(self, param: str, ranges: Ranges) -> np.ndarray:
        """The scales of a part of a parameter; `ranges` count blocks."""

        def read(name: str, index: Slices) -> np.ndarray:
            scale, _ = hf.read_scale(self.weights, self.hf_config, self.layout, name)
            return scale[index]

        return assemble(self._unsplit(param), ranges, read)

    def bias(self) -> np.ndarray | None:
        """The expert bias, float32[E], or None."""
        return hf.read_bias(self.weights, self.layout)

    def block(self) -> Block:
        """(out, in) of a block of 8 bits."""
        return fp8_blocks.block_size_or_default(self.hf_config)

    def _unsplit(self, param: str) -> list[Place]:
        places = self.layout.places_of(param)
        if any(place.columns != slice(None) for place in places):
            raise ValueError(
                f"checkpoint: 8-bit weights must have an array for each projection; got {places[0].name}, which holds "
                "two; pass a checkpoint of files, or leave keep_fp8 out"
            )
        return places

"""The conversion of a folder."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.typing import DTypeLike

from expertmesh.convert.quantization_config import Plan, check_quantization, with_quantization
from expertmesh.flax_moe import hf
from expertmesh.flax_moe.checkpoint import Checkpoint, Tensors, write_checkpoint
from expertmesh.flax_moe.checkpoint.export import StoredMatrices, bias_tensor, layer_tensors
from expertmesh.flax_moe.checkpoint.layout import any_layout, own_layout
from expertmesh.flax_moe.checkpoint.stored import StoredLayer
from expertmesh.flax_moe.models import fp4_blocks, fp8_blocks
from expertmesh.flax_moe.models.model_fields import name_of, of_text
from expertmesh.flax_moe.models.places import Layout

__all__ = ["convert"]

# Not weights, which the tensors are, nor weights in other formats.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".part"}
_LAYOUTS = {"expertmesh": own_layout, "huggingface": hf.layer_layout}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """One MoE layer.

    Attributes:
      stored: as the source has it.
      theirs: Hugging Face's names of it in files.
      target: its names in the target.
    """

    stored: StoredLayer
    theirs: Layout
    target: Layout

    def consumed(self) -> Iterator[str]:
        """The names of the source that this layer is made of."""
        for name in self.stored.layout.shapes:
            yield name
            yield fp8_blocks.scale_name(name)

    @property
    def is_fp8(self) -> bool:
        """Whether the source has its experts in 8 bits."""
        return self.stored.is_fp8("wi")

    def tensors(self, fp8: bool) -> list[Tensors]:
        """Of the target."""
        block = self.stored.block() if fp8 else None
        made = layer_tensors(StoredMatrices(self.stored), self.target, self.theirs, block)
        return [*made, *bias_tensor(self.target, self.stored.bias())]


def convert(
    source: str | pathlib.Path,
    target: str | pathlib.Path,
    *,
    to: str,
    dtype: DTypeLike | None = None,
    fp8: bool = False,
    prefix: str = "model.",
    max_shard_size: int = 5 * 10**9,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Writes the model of the folder `source` to `target`, its MoE layers under the names of `to`.

    Args:
      source: with `config.json` and safetensors files, under either names.
      target: a new or empty folder.
      to: "expertmesh" or "huggingface".
      dtype: of the MoE layers' weights that are not in 8 bits; None: their own, bfloat16 where 8 bits are widened.
      fp8: experts and shared experts in 8-bit blocks, bit for bit those of a source that has them.
      prefix: what stands before `layers.`.
      max_shard_size: bytes of a file.
      progress: see `write_checkpoint`.

    Raises:
      ValueError: a model that is not known or not expressible, by the field of its config; names that are missing, or
        that a MoE layer has no place for; a target that is not empty.

    Other weights, and files such as the tokenizer's, are copied unchanged. In memory is one tensor at a time.
    """
    files = Checkpoint(source)
    check_quantization(files.config)
    weights = fp4_blocks.widened(files, files.config)
    layers = _layers(weights, files.config, to, dtype, prefix)
    for layer in layers:
        layer.stored.check()
    rest = _rest(weights, files.config, layers)
    tensors = [_copied(weights, name) for name in rest]
    for layer in layers:
        tensors += layer.tensors(fp8)
    plan = Plan(
        others={name: weights[name] for name in rest},
        modules=tuple(layer.theirs.modules for layer in layers),
        is_fp8=fp8,
        unchanged=all(layer.is_fp8 == fp8 for layer in layers),
    )
    config = with_quantization(files.config, plan)
    write_checkpoint(target, tensors, config, max_shard_size=max_shard_size, progress=progress)
    _copy_files(files.folder, pathlib.Path(target))


def _layers(
    weights: Mapping[str, Any],
    config: Mapping[str, Any],
    to: str,
    dtype: DTypeLike | None,
    prefix: str,
) -> list[_Layer]:
    """The MoE layers of the source."""
    if to not in _LAYOUTS:
        raise ValueError(
            f"convert: to must be one of {', '.join(_LAYOUTS)}; got to={to!r}; choose whose names the target has"
        )
    numbers = hf.moe_layers(config)
    if not numbers:
        raise ValueError(
            "convert: the config must have MoE layers; got none of num_hidden_layers="
            f"{config.get('num_hidden_layers')}; there is nothing to convert"
        )
    return [
        _Layer(
            stored=StoredLayer(
                weights=weights,
                hf_config=config,
                layout=any_layout(weights, config, i, prefix=prefix),
                dtype=dtype,
            ),
            theirs=hf.layer_layout(config, i, prefix=prefix),
            target=_LAYOUTS[to](config, i, prefix=prefix),
        )
        for i in numbers
    ]


def _rest(weights: Mapping[str, Any], config: Mapping[str, Any], layers: list[_Layer]) -> list[str]:
    """The names of what is copied; a block has no other arrays than those of its parameters."""
    consumed = {name for layer in layers for name in layer.consumed()}
    rest = [name for name in weights if name not in consumed]
    blocks = tuple(layer.stored.layout.block for layer in layers)
    outside = {name for layer in layers for name in layer.stored.layout.outside}
    if strange := [n for n in rest if n.startswith(blocks) and n not in outside]:
        raise ValueError(
            f"convert: the blocks of a {name_of(of_text(config))} must have the arrays of its config alone; "
            f"got also {len(strange)}: {', '.join(strange[:3])}{', ...' * (len(strange) > 3)}; MoEConfig has no place "
            "for them"
        )
    return rest


def _copied(weights: Mapping[str, Any], name: str) -> Tensors:
    array = weights[name]
    return Tensors(types={name: (array.shape, array.dtype)}, make=lambda: {name: array})


def _copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    for path in sorted(source.iterdir()):
        weights = path.suffix in _NOT_COPIED or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, target / path.name)

"""Adapters of `lora.py` in the files of Hugging Face's PEFT: adapter_model.safetensors and adapter_config.json.

    our A [.., in, r]  <->  base_model.model.{weight}.lora_A.weight [r, in]
    our B [.., r, out] <->  base_model.model.{weight}.lora_B.weight [out, r]

`{weight}` is the name that `hf` has for the weight, such as `model.layers.0.mlp.experts.0.gate_proj`. An adapter has
the place of its weight. Nothing of Hugging Face is imported.
"""

import json
import math
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from expertmesh.flax_moe import hf
from expertmesh.flax_moe.checkpoint.files import read_file, write_file
from expertmesh.flax_moe.lora import Adapters, LoRA, low_rank
from expertmesh.flax_moe.models.places import (
    Layout,
    Place,
    Slices,
    assemble,
    extract,
    matrices_of,
    whole,
)
from expertmesh.flax_moe.quantization import layers_of

__all__ = [
    "adapter_config",
    "export_adapters",
    "load_adapters",
    "lora_config",
    "read_adapters",
    "write_adapters",
]

HfConfig = Mapping[str, Any]

_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
# Of a config, what would make it something else than W + alpha / rank A B of the modules, and what it must be.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "exclude_modules": ([], None),
    "target_parameters": ([], None),
    # Others start from weights that they change.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
}
# What is read here, and what changes no result of adapters that are trained.
_FREE = {
    *("r", "lora_alpha", "target_modules", "use_rslora"),
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("corda_config", "eva_config", "lora_dropout", "layers_pattern", "megatron_core", "task_type"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_ABSENT: tuple[Any, ...] = (None, False, "", [], {})


def export_adapters(
    adapters: Adapters, hf_config: HfConfig, layer: int, lora: LoRA, *, prefix: str = "model."
) -> dict[str, np.ndarray]:
    """The tensors of one decoder layer, by PEFT's names.

    Args:
      adapters: of the layer's block; arrays that this process holds as a whole.
      hf_config: the dict of `config.json`; see `hf.moe_config`.
      layer: the decoder layer's number.
      lora: that of the adapters.
      prefix: what stands before `layers.{layer}.` in the model.

    Returns:
      name -> contiguous array in the adapter's dtype: `lora_A.weight` [r, in] and `lora_B.weight` [out, r].

    Raises:
      ValueError: adapters of other weights or shapes than `lora` says; a model whose experts are no modules.
    """
    layout = _layout(hf_config, layer, lora, prefix)
    arrays = {
        _param(name, part): np.asarray(array)
        for name, parts in adapters.items()
        for part, array in parts.items()
    }
    got = {name: array.shape for name, array in arrays.items()}
    if got != layout.params:
        raise ValueError(
            f"peft.export_adapters: adapters must be {layout.params}, by the config and rank={lora.rank}; got {got}; "
            "pass the LoRA that they were made with"
        )
    return {
        name: extract(places, lambda param, at: arrays[param][at])
        for name, places in layout.by_name.items()
    }


def load_adapters(
    weights: Mapping[str, Any],
    hf_config: HfConfig,
    layer: int,
    lora: LoRA,
    *,
    dtype: DTypeLike | None = None,
    prefix: str = "model.",
) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of `export_adapters`.

    Args:
      weights: name -> array, as of `read_adapters`; only what the layer needs is read.
      hf_config, layer, lora, prefix: see `export_adapters`.
      dtype: of the adapters; None: their own.

    Raises:
      ValueError: names that are missing, arrays of other shapes than the config and the rank say, and arrays of the
        block's modules that are not read.
    """
    layout = _layout(hf_config, layer, lora, prefix)
    if missing := [name for name in layout.shapes if name not in weights]:
        raise ValueError(
            f"peft.load_adapters: weights must have the {len(layout.shapes)} names of layer {layer}'s adapters; "
            f"missing {len(missing)}: {', '.join(missing[:3])}; pass the targets that it was trained with, and `prefix`"
        )
    _check_no_others(weights, hf_config, layer, prefix, layout)

    def read(name: str, index: Slices) -> np.ndarray:
        array = np.asarray(weights[name])
        if array.shape != layout.shapes[name]:
            raise ValueError(
                f"peft.load_adapters: {name} must be {layout.shapes[name]}, by the config and rank={lora.rank}; got "
                f"{array.shape}; pass the configs of these weights"
            )
        return array[index] if dtype is None else array[index].astype(dtype)

    out: dict[str, dict[str, np.ndarray]] = {}
    for param, shape in layout.params.items():
        name, part = param.split(".")
        out.setdefault(name, {})[part] = assemble(layout.places_of(param), whole(shape), read)
    return out


def _check_no_others(
    weights: Collection[str], hf_config: HfConfig, layer: int, prefix: str, layout: Layout
) -> None:
    """Raises where the block's modules have arrays that are not read, such as a bias."""
    stems = {f"{_PREFIX}{stem}" for stem, _ in _stems(hf_config, layer, prefix)}
    of_block = (name for name in weights if name.partition(".lora_")[0] in stems)
    if others := [name for name in of_block if name not in layout.shapes]:
        raise ValueError(
            f"peft.load_adapters: weights of layer {layer} must be lora_A and lora_B of lora's targets alone; got also "
            f"{', '.join(others[:3])}; pass the LoRA of lora_config, or merge such adapters in PEFT"
        )


def adapter_config(
    lora: LoRA, hf_config: HfConfig, *, prefix: str = "model.", **fields: Any
) -> dict[str, Any]:
    """The dict of `adapter_config.json`: r, lora_alpha, target_modules and what says that there is nothing else.

    Args:
      lora: see LoRA.
      hf_config: see `hf.moe_config`.
      prefix: see `export_adapters`.
      fields: others of PEFT's, such as `base_model_name_or_path`; they come before these.

    `target_modules` is a list of the modules' names if these name the targets and no other weight of the block, else a
    regular expression.
    """
    targets = lora.of(hf.moe_config(hf_config))
    stems = list(_stems(hf_config, 0, prefix))
    names = sorted({_last(stem) for stem, place in stems if place.param in targets})
    modules: list[str] | str = names
    if any(_last(stem) in names and place.param not in targets for stem, place in stems):
        own = (re.escape(stem) for stem, place in stems if place.param in targets)
        modules = "|".join(sorted({re.sub(r"\d+", r"\\d+", name) for name in own}))
    plain = {key: values[0] for key, values in _PLAIN.items() if values[0] not in ([], False)}
    return {
        **plain,
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "inference_mode": True,
        **fields,
    }


def lora_config(config: Mapping[str, Any], hf_config: HfConfig, *, prefix: str = "model.") -> LoRA:
    """The LoRA of an `adapter_config.json`; `use_rslora` is an alpha of lora_alpha sqrt(r).

    Args:
      config: the dict of that file.
      hf_config: see `hf.moe_config`.
      prefix: see `export_adapters`.

    Raises:
      ValueError: adapters of another kind, or with a field that is not known here; ranks that differ; modules that are
        no weights of the block, or a gate projection without the up projection.
    """
    _check_plain(config)
    modules = config.get("target_modules") or ()
    found: dict[str, dict[str, bool]] = {}
    for layer in hf.moe_layers(hf_config):
        for stem, place in _stems(hf_config, layer, prefix):
            which, name = found.setdefault(place.param, {}), _last(stem)
            is_target = _is_target(stem, modules)
            which[name] = which.get(name, False) or is_target
    targets = tuple(name for name, which in found.items() if all(which.values()))
    if not targets or any(len(set(which.values())) == 2 for which in found.values()):
        raise ValueError(
            f"peft: target_modules must be whole weights of the block, both gate and up projections; got "
            f"{modules!r} under prefix={prefix!r}; add adapters of zeros, or pass the model's prefix"
        )
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    alpha *= math.sqrt(rank) if config.get("use_rslora") else 1
    return LoRA(rank=rank, alpha=alpha, targets=targets)


def _check_plain(config: Mapping[str, Any]) -> None:
    """Raises unless the adapters are W + alpha / rank A B of whole modules."""
    for key, value in config.items():
        allowed = _PLAIN.get(key, _ABSENT)
        if key not in _FREE and value not in allowed:
            raise ValueError(
                f"peft: {key} must be {allowed[0]!r}; got {key}={value!r}; merge such adapters in PEFT"
            )
    if missing := [key for key in ("r", "lora_alpha") if not config.get(key)]:
        raise ValueError(
            f"peft: the config must have r and lora_alpha; got none of {', '.join(missing)}; pass the dict of "
            f"{_CONFIG}"
        )


def write_adapters(
    folder: str | pathlib.Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> None:
    """A folder that PEFT reads: `tensors` of all layers, and what `adapter_config` returns."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _TENSORS, tensors)
    (folder / _CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")


def read_adapters(folder: str | pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(name -> array, mapped from disk; the dict of `adapter_config.json`) of a folder that PEFT wrote."""
    folder = pathlib.Path(folder)
    return read_file(folder / _TENSORS), json.loads((folder / _CONFIG).read_text())


def _layout(hf_config: HfConfig, layer: int, lora: LoRA, prefix: str) -> Layout:
    """Where the adapters of a layer lie."""
    weights = hf.layer_layout(hf_config, layer, prefix=prefix).params
    shapes = {
        name: low_rank(name, weights[name], lora.rank) for name in lora.of(hf.moe_config(hf_config))
    }
    places = [
        Place(f"{_PREFIX}{stem}.lora_{part.upper()}{_WEIGHT}", _param(place.param, part), at)
        for stem, place in _stems(hf_config, layer, prefix)
        if place.param in shapes
        for part, at in low_rank(place.param, place.at, slice(None)).items()
    ]
    return Layout(
        block=_PREFIX + prefix,
        places=tuple(places),
        params={_param(name, part): s for name, of in shapes.items() for part, s in of.items()},
        matrices=matrices_of(places),
        bias=None,
    )


def _stems(hf_config: HfConfig, layer: int, prefix: str) -> Iterator[tuple[str, Place]]:
    """(module, place of its weight) of each GEMM of a block."""
    layers = layers_of(hf.moe_config(hf_config))
    for place in hf.layer_layout(hf_config, layer, prefix=prefix).places:
        if place.param not in layers:
            continue
        if not place.name.endswith(_WEIGHT) or place.columns != slice(None) or not place.transposed:
            raise ValueError(
                f"peft: each projection of an expert must be a module with a weight [out, in]; got {place.name}; "
                "merge_lora, and export the weights"
            )
        yield place.name.removesuffix(_WEIGHT), place


def _is_target(stem: str, modules: str | Iterable[str]) -> bool:
    if modules == "all-linear":
        return True
    if isinstance(modules, str):
        return re.fullmatch(modules, stem) is not None
    return any(stem == name or stem.endswith(f".{name}") for name in modules)


def _last(stem: str) -> str:
    return stem.rpartition(".")[2]


def _param(name: str, part: str) -> str:
    return f"{name}.{part}"

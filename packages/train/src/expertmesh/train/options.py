"""The options of the main job: one frozen dataclass per group, one line per option.

Each field holds its default, the function that reads it from text, and its line in `--help`; the
command line is derived from the fields (cli.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The names of expertmesh.core.quantization.recipe, which is not imported before the options are read.
RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
OPTIMIZERS = ("adamw", "muon")
# What is done again in the backward, rising; those between are policies of the block, as expertmesh.flax_moe.remat.
REMAT = ("none", "save_8_bits", "save_min", "recompute", "full")

# What is read of --data.
MAX_BYTES = 64 << 20


class UsageError(ValueError):
    """Input that the user can put right. The message is one line: what, rule, value, remedy."""


class TrainingError(RuntimeError):
    """Training cannot go on. The message is one line: what, rule, value, remedy."""


def _option(default: Any, parse: Callable[[str], Any], help_: str, metavar: str = "N") -> Any:
    metadata = {"parse": parse, "help": help_, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def _rule(rule: str, remedy: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {rule}; got {text!r}; {remedy}")


def _count(text: str) -> int:
    return _integer(text, 1)


def _whole(text: str) -> int:
    return _integer(text, 0)


def _seed(text: str) -> int:
    value = _integer(text, 0)
    if value >= 2**32:  # of larger ones JAX's keys drop bits
        raise _rule("below 2^32", "give a smaller one", text)
    return value


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise _rule(f"a whole number of at least {least}", f"give {least} or more", text)
    return value


def _positive(text: str) -> float:
    value = _float(text)
    if not value > 0:
        raise _rule("a number above 0", "give a positive number such as 0.001", text)
    return value


def _at_least(text: str, least: int, remedy: str) -> float:
    value = _float(text)
    if not value >= least:
        raise _rule(f"a number of at least {least}", remedy, text)
    return value


def _factor(text: str) -> float:
    return _at_least(text, 1, "leave it out to drop nothing")


def _non_negative(text: str) -> float:
    return _at_least(text, 0, "give 0 to switch it off")


def _float(text: str) -> float:
    """The number that `text` spells, or NaN, which no rule accepts."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _path(text: str) -> Path:
    if not text:
        raise _rule("a path", "give a file or a folder", text)
    return Path(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise _rule(f"one of {', '.join(choices)}", f"give {choices[0]}", text)
        return text

    return parse


def _mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Reads "fsdp=2,ep=4" into (("fsdp", 2), ("ep", 4))."""
    example = "write it like fsdp=2,ep=4"
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, equals, size = (part.strip() for part in entry.partition("="))
        if not equals or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise _rule("axis=size entries with sizes of at least 1", example, text)
        if name not in ("fsdp", "ep"):
            raise _rule(f"made of the axes fsdp and ep, not {name!r}", example, text)
        if name in sizes:
            raise _rule(f"without a second {name!r}", example, text)
        sizes[name] = int(size)
    return tuple(sizes.items())


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise _rule("host:port", "give the address of process 0, such as node0:12345", text)
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """model"""

    layers: int = _option(2, _count, "decoder layers")
    model_dim: int = _option(256, _count, "model width; quantizable if a multiple of 256")
    heads: int = _option(4, _count, "attention heads")
    experts: int = _option(8, _count, "experts per layer")
    top_k: int = _option(2, _count, "experts per token")
    expert_dim: int = _option(256, _count, "expert width; quantizable if a multiple of 128")
    seq_len: int = _option(128, _count, "bytes per sequence")
    capacity_factor: float | None = _option(
        None,
        _factor,
        "receive rows per device over the even share, 1 or more; unset: nothing is dropped",
        "X",
    )
    aux_loss: float = _option(5e-2, _non_negative, "coefficient of the load-balance loss", "X")
    z_loss: float = _option(1e-3, _non_negative, "coefficient of the router z-loss", "X")
    transport: str = _option("auto", str, "how tokens move between devices", "NAME")
    recipe: str | None = _option(
        None,
        _one_of(*RECIPES),
        f"how the experts are quantized: {', '.join(RECIPES)}; unset: not at all",
        "NAME",
    )
    dtype: str = _option(
        "auto",
        _one_of("auto", "float32", "bfloat16"),
        "compute dtype; auto: float32 on CPU, bfloat16 on GPU",
        "NAME",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """training"""

    data: Path | None = _option(
        None,
        _path,
        f"text file or folder; its first {MAX_BYTES >> 20} MiB are read, and every tenth file is held out, of fewer "
        "than ten files the last tenth; unset: the sources of this Python's standard library",
        "PATH",
    )
    steps: int = _option(200, _count, "training steps")
    batch_size: int | None = _option(
        None,
        _count,
        "sequences per step; unset: 8, or the next multiple of the number of devices times --grad-accum, and under "
        "--resume the run's own",
    )
    grad_accum: int = _option(
        1,
        _count,
        "microbatches of a step, whose gradients are added; each is balanced by itself",
    )
    remat: str = _option(
        "none",
        _one_of(*REMAT),
        "what the backward computes again: none; save_8_bits: activations, of hidden layers kept in 8 bits; "
        "save_min: experts, but no exchange; recompute: experts and exchanges; full: layers",
        "NAME",
    )
    offload: bool = _option(
        False,
        bool,
        "keep the optimizer's state and float32 weights in the host's memory, and layers' inputs under --remat full",
    )
    optimizer: str = _option(
        "adamw",
        _one_of(*OPTIMIZERS),
        "adamw; or muon: experts' weights by Muon, all else by AdamW",
        "NAME",
    )
    learning_rate: float = _option(3e-3, _positive, "peak learning rate", "X")
    weight_decay: float = _option(0.1, _non_negative, "weight decay of matrices", "X")
    clip: float = _option(1.0, _positive, "largest norm of the gradient", "X")
    seed: int = _option(0, _seed, "seed of the parameters and of the batches")
    eval_every: int = _option(50, _count, "steps between validations; there is one at the end")
    eval_windows: int = _option(128, _count, "validation sequences, spread over the held-out bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """run"""

    out: Path = _option(Path("runs/default"), _path, "folder of this run's files", "DIR")
    resume: bool = _option(False, bool, "continue from the last good checkpoint in --out")
    checkpoint_every: int = _option(
        50, _count, "steps between checkpoints; there is one at the end"
    )
    keep: int = _option(3, _count, "checkpoints to keep")
    log_every: int = _option(10, _count, "steps between updates of the progress line")
    phases: bool = _option(
        False, bool, "time the phases of the first layer's block after the last step"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """devices"""

    mesh: tuple[tuple[str, int], ...] = _option(
        (), _mesh, "mesh axes, such as fsdp=2,ep=4; an axis left out takes the rest", "AXES"
    )
    axis_types: str = _option(
        "explicit", _one_of("explicit", "auto"), "explicit: sharding in types; or auto", "NAME"
    )
    shard_exp_on_fsdp: bool = _option(
        False, bool, "fsdp splits the experts' weights by experts and not by width"
    )
    spare_experts: int = _option(
        0,
        _whole,
        "spare slots of each rank of ep for copies of hot experts, which make ranks level; buffers hold "
        "--capacity-factor times the even share, once if that is unset, and the rest is dropped",
    )
    cpu_devices: int | None = _option(
        None, _count, "virtual CPU devices of this process; unset: 8 shared by all processes"
    )
    coordinator: str | None = _option(
        None, _address, "address of process 0; unset: ask Slurm, MPI or Kubernetes", "HOST:PORT"
    )
    num_processes: int | None = _option(None, _count, "processes of the job")
    process_id: int | None = _option(None, _whole, "number of this process, from 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """All options; `Options()` is the default run."""

    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    run: RunOptions = RunOptions()
    devices: DeviceOptions = DeviceOptions()

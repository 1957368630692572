"""What the conformance suite runs over. A new transport, mesh mode or kernel is added here, and nowhere else.

Tests take a `Setting` and call `run_on_mesh`. Those marked `any_process` run again over the devices of several
processes (test_processes.py), where this module lists fewer settings: each process compiles everything.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_oracle import Exchange, shards
from expertmesh.core import MeshResource, global_shard_guard, grouped_gemm
from expertmesh.ep import EpConfig, is_supported, recv_capacity

AXES = ("dp", "fsdp", "ep")
TOKENS = PartitionSpec(AXES)
RESOURCE = MeshResource(dp_resource="dp", fsdp_resource="fsdp", ep_resource="ep")
# Of two levels: hosts are along fsdp.
RESOURCE_OF_HOSTS = MeshResource(dp_resource="dp", ep_resource=("fsdp", "ep"))

# The collectives of one dispatch and of one combine, by the number of ranks.
TRANSPORTS: Mapping[str, Callable[[int], tuple[dict[str, int], dict[str, int]]]] = {
    "ring": lambda ranks: ({"all-gather": 1}, {"reduce-scatter": 1}),
    "all_to_all": lambda ranks: ({"all-to-all": 1}, {"all-to-all": 1}),
    "ragged": lambda ranks: ({"ragged-all-to-all": 1}, {"ragged-all-to-all": 1}),
    "nvlink": lambda ranks: ({}, {}),
    "two_level:all_to_all": lambda ranks: ({"all-to-all": 2}, {"all-to-all": 2}),
    "two_level:ring": lambda ranks: (
        {"all-to-all": 1, "all-gather": 1},
        {"all-to-all": 1, "reduce-scatter": 1},
    ),
    "two_level:nvlink": lambda ranks: ({"all-to-all": 1}, {"all-to-all": 1}),
}


def _supported(transport: str) -> bool:
    return all(is_supported(name)[0] for name in transport.split(":"))


TRANSPORTS = {name: moves for name, moves in TRANSPORTS.items() if _supported(name)}
# How a program is laid out: "explicit" and "resource" axes, a "manual" shard_map over all of them, "auto" axes of which
# the library knows nothing, "single" for no mesh.
MODES = ("explicit", "resource", "manual", "auto")
# Implementations of the grouped GEMM, with the signature of `grouped_gemm`.
GROUPED_GEMMS: Mapping[str, Callable] = {"grouped_gemm": grouped_gemm}
# Slots of each rank for copies of experts, by which an exchange is balanced.
SPARE = (1, 2)
# Sizes of AXES, by how many devices there are.
MESHES = {
    1: ((1, 1, 1),),
    2: ((1, 1, 2), (2, 1, 1)),
    4: ((1, 1, 4), (2, 1, 2), (1, 2, 2)),
    8: ((2, 1, 4), (2, 2, 2), (1, 1, 8)),
}[max(n for n in (1, 2, 4, 8) if n <= jax.device_count())]
# Those of two hosts, along fsdp: no more than choices, so that one block for each of them holds what it is sent.
HOSTS = {1: ((1, 1, 1),), 2: ((1, 2, 1),), 4: ((1, 2, 2),), 8: ((1, 2, 4), (2, 2, 2))}[
    prod(MESHES[0])
]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run an exchange."""

    mode: str
    transport: str = "auto"
    sizes: tuple[int, int, int] = (1, 1, 1)
    dtype: str = "float32"

    def __str__(self):
        sizes = "x".join(map(str, self.sizes))
        return f"{self.mode}-{self.transport}-{sizes}-{self.dtype}"

    @property
    def mesh_shape(self) -> dict[str, int]:
        return dict(zip(AXES, self.sizes, strict=True))

    @property
    def mesh(self):
        kind = AxisType.Explicit if self.mode == "explicit" else AxisType.Auto
        devices = jax.devices()[: prod(self.sizes)]
        return jax.make_mesh(self.sizes, AXES, axis_types=(kind,) * len(AXES), devices=devices)

    @property
    def is_whole(self) -> bool:
        """One participant holds everything."""
        return self.mode in ("single", "auto")

    @property
    def ep(self) -> tuple[str, ...]:
        """The axes of the EP group."""
        return ("fsdp", "ep") if self.transport.startswith("two_level") else ("ep",)

    @property
    def resource(self) -> MeshResource:
        """Who has which role on the mesh."""
        return RESOURCE if self.ep == ("ep",) else RESOURCE_OF_HOSTS

    @property
    def num_ranks(self) -> int:
        return 1 if self.is_whole else prod(self.mesh_shape[name] for name in self.ep)

    @property
    def num_participants(self) -> int:
        return 1 if self.is_whole else prod(self.sizes)

    @property
    def participants(self) -> PartitionSpec:
        """Of arrays with a leading dimension of participants."""
        return PartitionSpec() if self.is_whole else TOKENS

    def config(self, num_experts: int, **changes) -> EpConfig:
        """The axis of the EP group is named where no MeshResource names it."""
        named = self.ep[0] if len(self.ep) == 1 else self.ep
        axis = {"single": (), "resource": None}.get(self.mode, named)
        return EpConfig(num_experts=num_experts, transport=self.transport, axis=axis, **changes)

    def oracle(self, topk_idx: np.ndarray, num_experts: int, capacity=None, alignment=1):
        """The exchange by loops; without a capacity, that of the config's default."""
        num_tokens, top_k = topk_idx.shape
        if self.is_whole:
            blocks = [np.arange(num_tokens)]
        else:
            blocks = list(shards(self.mesh_shape, (AXES,), (num_tokens,), self.ep))
        if capacity is None:
            capacity = recv_capacity(num_experts, top_k, len(blocks[0]), self.num_ranks, alignment)
        return Exchange(topk_idx, blocks, self.num_ranks, num_experts, capacity, alignment)


def _exchanges() -> list[Setting]:
    """Every transport in every mode that knows the layout; each mode has its mesh, some are in bfloat16."""
    pairs = itertools.product(enumerate(MODES[:3]), enumerate(TRANSPORTS))
    return [
        Setting(
            mode,
            transport,
            sizes_for(mode, transport),
            ("float32", "float32", "bfloat16")[(i + j) % 3],
        )
        for (i, mode), (j, transport) in pairs
    ]


def sizes_for(mode: str, transport: str) -> tuple[int, int, int]:
    """The mesh of the settings of a mode: with hosts for a transport of two levels."""
    meshes = HOSTS if transport.startswith("two_level") else MESHES
    return meshes[MODES.index(mode) % len(meshes)]


def _one_each(settings: list[Setting]) -> list[Setting]:
    """One setting of each mode, the transports in turn."""
    turn = itertools.cycle(TRANSPORTS)
    return [
        next(s for s in settings if (s.mode, s.transport) == (mode, transport))
        for mode, transport in zip(MODES[:3], turn, strict=False)
    ]


_EVERY = _exchanges()
_OTHERS = [Setting("auto", sizes=MESHES[0]), Setting("single")]
# Many participants, each an EP group of its own.
_LONELY = [Setting("explicit", sizes=(prod(MESHES[0]), 1, 1))]
_MESHES_EACH = _one_each(_EVERY)
# Where GPUs have it, "auto" takes it: there each mode runs by it.
_NVLINK = [s for s in _EVERY if s.transport == "nvlink"]

if jax.process_count() == 1:
    SETTINGS = _MESHES_EACH + _NVLINK + _OTHERS
    EACH_MODE = (_NVLINK or _MESHES_EACH) + _OTHERS[:1]
    MORE = [s for s in _EVERY if s not in SETTINGS] + _LONELY
elif _NVLINK:
    SETTINGS = EACH_MODE = _NVLINK
    MORE = []
else:  # what these processes run, each of them compiles
    first = _MESHES_EACH[:2] if jax.process_count() == 2 else _MESHES_EACH[:1]
    SETTINGS = first + [s for s in _EVERY if s.transport == "two_level:all_to_all"][:1]
    EACH_MODE, MORE = (first[1:], []) if jax.process_count() == 2 else ([], [])
# A block's weights are split over the axes fsdp and ep at once.
SPLIT_BOTH_WAYS = [Setting("explicit", s.transport, MESHES[-1]) for s in _NVLINK[:1]]


def parametrize(settings, more=()):
    """Settings that always run, and those that run by `-m full`."""
    more = [pytest.param(s, marks=pytest.mark.full) for s in more]
    return pytest.mark.parametrize("setting", [*settings, *more], ids=str)


every_setting = parametrize(SETTINGS, MORE)
each_mode = parametrize(EACH_MODE)
# For programs that take seconds to compile: types and roles, two transports.
two_modes = parametrize(EACH_MODE[:2], EACH_MODE[2:])
each_mesh_mode = parametrize([s for s in EACH_MODE if not s.is_whole])


def put(x, sharding):
    """A global array, in any number of processes."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def whole(x) -> np.ndarray:
    """A global array's value, on every process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def place(setting: Setting, operands, specs):
    """The operands where `specs` say."""
    if setting.mode == "single":
        return tuple(map(jnp.asarray, operands))
    mesh = setting.mesh
    return tuple(put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True))


def in_mode(setting: Setting, function: Callable, in_specs, out_specs=TOKENS):
    """The function of global arrays: itself, or a shard_map of it."""
    if setting.mode != "manual":
        return function
    return jax.shard_map(function, mesh=setting.mesh, in_specs=in_specs, out_specs=out_specs)


def roles(setting: Setting):
    """The context of a call in this setting."""
    return global_shard_guard(setting.resource if setting.mode == "resource" else None)


@functools.cache
def _compiled(setting, function, in_specs, out_specs, static, types):
    mapped = in_mode(setting, functools.partial(function, **dict(static)), in_specs, out_specs)
    zeros = [np.zeros(shape, dtype) for shape, dtype in types]
    with roles(setting):
        return jax.jit(mapped).lower(*place(setting, zeros, in_specs)).compile()


def compile_on_mesh(setting, function, operands, in_specs, out_specs=TOKENS, **static):
    """The program of `run_on_mesh`, for its text and layouts; each is compiled once."""
    types = tuple((x.shape, x.dtype) for x in operands)
    static = tuple(sorted(static.items()))
    return _compiled(setting, function, tuple(in_specs), out_specs, static, types)


def run_on_mesh(setting, function: Callable, operands, in_specs, out_specs=TOKENS, **static):
    """The function's results as NumPy arrays.

    Args:
      setting: where and how.
      function: `function(*arrays, **static) -> tree of arrays`, of module level.
      operands: NumPy arrays, alike on all processes.
      in_specs: one PartitionSpec for each.
      out_specs: of the results, for a manual shard_map; by default tokens or participants lead each.
      static: hashable.
    """
    compiled = compile_on_mesh(setting, function, operands, in_specs, out_specs, **static)
    return jax.tree.map(whole, compiled(*place(setting, operands, in_specs)))


def assert_close(got, want, tolerance, name=""):
    """Relative norm and cosine; where `want` is 0, so is `got`."""
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    assert got.shape == want.shape, f"{name}: {got.shape}, want {want.shape}"
    norm, error = np.linalg.norm(want.ravel()), np.linalg.norm((got - want).ravel())
    assert error <= tolerance * norm, f"{name}: relative error {error / max(norm, 1e-300):.1e}"
    assert norm == 0 or got.ravel() @ want.ravel() > (1 - tolerance) * norm * np.linalg.norm(got), (
        name
    )

"""The contract that every op keeps, as one test: `check_op(case, setting)`.

A "case" says what an op computes (an oracle in NumPy, by another route) and how its operands may be laid out. A
"setting" says where and how it runs. `covering_settings` chooses settings so that every two values of different
factors meet; `full_settings` is the product of all that says how a program is made.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from expertmesh.core.hlo import collectives
from expertmesh.core.mesh import MeshResource, global_shard_guard
from expertmesh.core.specs import filter_axes

AXES = ("a", "b")  # every layout is written with these two mesh axes

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "mode": (
        "single",  # no mesh
        "auto",  # Auto axes, the compiler propagates
        "gspmd",  # the same with the older partitioner
        "resource",  # Auto axes under a MeshResource
        "explicit",  # Explicit axes
        "explicit_set_mesh",  # the same with the mesh in context
        "manual",  # inside the user's shard_map over all axes
        "partial_explicit",  # inside a shard_map over "a"; "b" is Explicit
        "partial_resource",  # inside a shard_map over "a"; "b" is Auto under a MeshResource
    ),
    "mesh": ((1, 1), (1, 2), (2, 2), (2, 4), (8, 1)),
    "layout": ("one", "several", "tuple"),
    "transform": ("jit", "grad", "vmap", "scan", "remat", "poison"),
    "dtype": ("float32", "bfloat16"),
    "size": ("regular", "odd", "empty"),
}

# Modes by which a call reaches an op in the same way, and transforms by which the same is checked: a covering array has
# each of them, and of their pairs with other factors those of what they are alike to.
PATHS: Mapping[str, str] = {
    "single": "compiler",
    "auto": "compiler",
    "gspmd": "compiler",
    "resource": "roles",
    "explicit": "types",
    "explicit_set_mesh": "types",
    "manual": "manual",
    "partial_explicit": "manual",
    "partial_resource": "manual",
}
CHECKS: Mapping[str, str] = {
    "jit": "value",
    "vmap": "stack",
    "scan": "stack",
    "grad": "gradient",
    "remat": "gradient",
    "poison": "poison",
}

# Modes in which nothing but the operands' layouts says where anything is.
STATED = ("explicit", "explicit_set_mesh", "manual", "partial_explicit")

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """What an op computes and how its operands may lie.

    Attributes:
      name: unique.
      function: the public function of array operands only.
      operands: `operands(rng, size, dtype) -> arrays`; size is "regular" (dimensions that layouts shard are multiples
        of 8), "odd" (all other dimensions are primes) or "empty" (no rows).
      oracle: float64 NumPy of the same operands, by another route than the reference.
      wrt: operands in which the function is differentiable.
      layouts: layout name -> one spec per operand, over the axes "a" (major) and "b".
      independent: layout name -> one spec per result, for layouts in which the function of the shards is the shards of
        the function.
      exchanges: the function communicates even there, and takes the EP axis "b" from a MeshResource in every mode.
      poison: operands with NaN wherever the result must not depend on the value, or None.
    """

    name: str
    function: Callable[..., Any]
    operands: Callable[[np.random.Generator, str, str], tuple[Any, ...]]
    oracle: Callable[..., Any]
    wrt: tuple[int, ...] = ()
    layouts: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    independent: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    exchanges: bool = False
    poison: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value of each factor."""

    mode: str
    mesh: tuple[int, int]
    layout: str
    transform: str
    dtype: str
    size: str

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self))).replace(" ", "")


_Traits = tuple[frozenset[str], frozenset[str], bool, bool]
_Function = Callable[..., Any]
_Transform = Callable[[_Function], _Function]


def _traits(case: OpCase) -> _Traits:
    """All that the validity of a setting depends on: layouts, independent layouts, differentiable, poisonable."""
    layouts, independent = frozenset(case.layouts), frozenset(case.independent)
    return layouts, independent, bool(case.wrt), case.poison is not None


def _is_valid(traits: _Traits, setting: Setting) -> bool:
    """Whether the setting makes sense for such a case, and JAX has the devices."""
    layouts, independent, differentiable, poisonable = traits
    return (
        setting.layout in layouts
        and (setting.mode != "single" or setting.mesh == (1, 1))
        and setting.mesh[0] * setting.mesh[1] <= jax.device_count()
        and not (PATHS[setting.mode] == "manual" and setting.layout not in independent)
        and not (CHECKS[setting.transform] == "gradient" and not differentiable)
        # The gradients' program is run on poisoned operands, too.
        and not (setting.transform == "poison" and (differentiable or not poisonable))
        and not _fails_elsewhere(setting)
    )


def _fails_elsewhere(setting: Setting) -> bool:
    """Whether JAX or XLA:CPU cannot do it, whatever the op."""
    empty, partly = setting.size == "empty", setting.mode.startswith("partial")
    in_shard_map, compiler = PATHS[setting.mode] == "manual", setting.mode in ("auto", "gspmd")
    backward = setting.transform in ("grad", "remat", "poison")
    return (
        # Shardy and XLA:CPU fail or crash on gradients of, and loops over, buffers that are sharded and empty, and on a
        # user's shard_map of nothing else.
        (empty and (in_shard_map or (compiler and setting.transform not in ("jit", "vmap"))))
        # JAX cannot differentiate a shard_map that replicates over a Manual axis of size 1 beside other axes.
        or (partly and setting.mesh[0] == 1 and backward)
        # XLA:CPU aborts on the bfloat16 all-reduce that JAX makes of any gradient of a replicated operand there.
        or (partly and setting.dtype == "bfloat16" and backward)
    )


def all_settings(case: OpCase) -> Sequence[Setting]:
    """Every valid setting."""
    return _all_settings(_traits(case))


@functools.cache
def _all_settings(traits: _Traits) -> tuple[Setting, ...]:
    every = itertools.starmap(Setting, itertools.product(*FACTORS.values()))
    return tuple(setting for setting in every if _is_valid(traits, setting))


def full_settings(case: OpCase) -> list[Setting]:
    """Every valid mode, mesh, layout and transform together; dtype and size rotate through the first three.

    The transforms of one layout follow each other, with its dtype and size if they are valid: what is traced for one
    serves the others.
    """
    layouts: dict[tuple[Any, ...], dict[str, dict[tuple[str, str], Setting]]] = {}
    for setting in all_settings(case):
        programs = layouts.setdefault((setting.mode, setting.mesh, setting.layout), {})
        data = setting.dtype, setting.size
        programs.setdefault(setting.transform, {})[data] = setting
    every = list(itertools.product(FACTORS["dtype"], FACTORS["size"]))
    chosen = []
    for i, programs in enumerate(layouts.values()):
        # Another start in each round: as many values divide the layouts of a mesh.
        first = (i + i // len(every)) % len(every)
        turn = every[first:] + every[:first]
        chosen += [next(same[data] for data in turn if data in same) for same in programs.values()]
    return chosen


def covering_settings(
    cases: Sequence[OpCase], seed: int = 0, **only: tuple[Any, ...]
) -> list[tuple[OpCase, Setting]]:
    """Few (case, setting) with every mode, in which every two values of two other factors meet.

    In pairs the mode stands for its path (`PATHS`). The case is a factor, too: each meets every path, check (`CHECKS`),
    dtype and size.

    Args:
      cases: of one package or of all.
      seed: of the choice among equals.
      only: factor -> the values to use, for cases that are too dear for all of them.
    """
    candidates = [
        (case, setting)
        for case in cases
        for setting in all_settings(case)
        if all(getattr(setting, factor) in values for factor, values in only.items())
    ]
    return [candidates[i] for i in _cover(_pairs(candidates), np.random.default_rng(seed))]


def _cover(pairs: np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """Rows that have every number of int[rows, numbers]."""
    missing = np.zeros(pairs.max(initial=-1) + 1, bool)
    missing[pairs] = True
    while missing.any():
        # The best of a sample: near the greedy optimum at a fraction of its cost.
        holders = np.flatnonzero((pairs == np.argmax(missing)).any(axis=1))
        sample = rng.permutation(holders)[:200]
        best = sample[np.argmax(missing[pairs[sample]].sum(axis=1))]
        missing[pairs[best]] = False
        yield int(best)


def _pairs(candidates: Sequence[tuple[OpCase, Setting]]) -> np.ndarray:
    """int[candidates, pairs of factors]: a number for each two values that meet in a candidate."""
    rows = [
        {"case": case.name, "path": PATHS[setting.mode], "check": CHECKS[setting.transform]}
        | vars(setting)
        for case, setting in candidates
    ]
    meeting = [("mode", "mode"), *itertools.combinations(["path", *list(FACTORS)[1:]], 2)]
    meeting += [("case", factor) for factor in ("path", "check", "dtype", "size")]
    columns = []
    for a, b in meeting:
        numbers: dict[tuple[Any, Any], int] = {}
        columns.append([numbers.setdefault((row[a], row[b]), len(numbers)) for row in rows])
    firsts = np.cumsum([0, *(max(column, default=-1) + 1 for column in columns[:-1])])
    return np.asarray(np.reshape(columns, (len(meeting), len(rows))).T + firsts)


def check_op(case: OpCase, setting: Setting, seed: int = 0) -> None:
    """Raises AssertionError where the op breaks its contract in this setting."""
    with _Run(case, setting, seed) as run:
        {
            "jit": run.check_value,
            "grad": lambda: run.check_gradient(lambda f: f),
            "remat": lambda: run.check_gradient(jax.checkpoint),
            "vmap": lambda: run.check_stacked(jax.vmap),
            "scan": lambda: run.check_stacked(_scan),
            "poison": run.check_poison,
        }[setting.transform]()


def _scan(function: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(*stacked: jax.Array) -> Any:
        return jax.lax.scan(lambda _, operands: (0, function(*operands)), 0, stacked)[1]

    return scanned


class _Run(contextlib.ExitStack):
    """A case in a setting: mesh, contexts, and operands laid out."""

    def __init__(self, case: OpCase, setting: Setting, seed: int) -> None:
        super().__init__()
        self.case, self.setting = case, setting
        self.rng = np.random.default_rng(seed)
        self.mesh = None if setting.mode == "single" else _make_mesh(setting)
        self.enter_context(jax.default_matmul_precision("highest"))  # no TF32 on GPUs
        named = case.exchanges and setting.mode not in ("single", "auto", "gspmd")
        if "resource" in setting.mode or named:
            self.enter_context(global_shard_guard(MeshResource(fsdp_resource="a", ep_resource="b")))
        # A program that reads none of its operands, as they are empty, learns its devices from the context only.
        placeless = setting.mode == "explicit" and setting.size == "empty"
        if setting.mode == "explicit_set_mesh" or placeless:
            self.enter_context(jax.set_mesh(self.mesh))
        if setting.mode == "gspmd":
            self.enter_context(_config("jax_use_shardy_partitioner", False))
        self.specs = case.layouts[setting.layout]
        self.results = case.independent.get(setting.layout)

    def operands(self) -> tuple[np.ndarray, ...]:
        return tuple(
            map(np.asarray, self.case.operands(self.rng, self.setting.size, self.setting.dtype))
        )

    def put(
        self, operands: Sequence[np.ndarray], leading: tuple[None, ...] = ()
    ) -> tuple[jax.Array, ...]:
        if self.mesh is None:
            return tuple(map(jnp.asarray, operands))
        return tuple(
            _put(x, NamedSharding(self.mesh, PartitionSpec(*leading, *spec)))
            for x, spec in zip(operands, self.specs, strict=True)
        )

    def function(self) -> Callable[..., Any]:
        """The case's function, inside a shard_map where the mode asks for one."""
        manual = {"manual": AXES, "partial_explicit": AXES[:1], "partial_resource": AXES[:1]}
        axes = manual.get(self.setting.mode)
        if axes is None:
            return self.case.function
        results = tuple(filter_axes(spec, axes) for spec in self.results or ())
        return jax.shard_map(
            self.case.function,
            mesh=self.mesh,
            in_specs=tuple(filter_axes(spec, axes) for spec in self.specs),
            out_specs=results[0] if len(results) == 1 else results,
            axis_names=set(axes),
            # Replicated operands are made varying by the library; in a partly manual region JAX cannot check it.
            check_vma=self.setting.mode == "manual",
        )

    def check_value(self) -> None:
        """The result is the oracle's, a second call traces nothing, and independent shards communicate nothing."""
        operands = self.operands()
        inner, placed, traces = self.function(), self.put(operands), []

        @jax.jit
        def function(*operands: jax.Array) -> Any:
            traces.append(operands)
            return inner(*operands)

        out = function(*placed)
        self.assert_close(out, self.case.oracle(*_float64(operands)))
        self.assert_close(function(*placed), self.case.oracle(*_float64(operands)))
        assert len(traces) == 1, f"{self.case.name}: the second call was traced again"
        split = {a for a, n in zip(AXES, self.setting.mesh, strict=True) if n > 1}
        # Elsewhere the compiler or the roles choose the layouts.
        stated = self.setting.mode in STATED
        if self.results is not None and split and stated and not self.case.exchanges:
            found = collectives(function.lower(*placed).compile().as_text() or "")
            assert not found, f"{self.case.name}: independent shards communicate: {found}"

    def check_gradient(self, transform: _Transform) -> None:
        """Directional derivatives equal central differences of the oracle; values that must not matter do not."""
        operands = self.operands()
        out = self.case.oracle(*_float64(operands))
        cotangents = [self.rng.normal(size=np.shape(y)) for y in _leaves(out)]
        wrt = self.case.wrt
        function = jax.jit(_with_gradients(transform(self.function()), wrt, cotangents))
        results = value, gradients = function(*self.put(operands))
        self.assert_close(value, out)
        for i, gradient in zip(wrt, gradients, strict=True):
            assert gradient.dtype == operands[i].dtype, (
                f"{self.case.name}: dtype of the gradient of operand {i}"
            )
            self._check_direction(operands, cotangents, i, _whole(gradient))
        if self.case.poison is not None:
            self.assert_equal(results, function(*self.put(self.case.poison(*operands))))

    def _check_direction(
        self,
        operands: Sequence[np.ndarray],
        cotangents: Sequence[np.ndarray],
        i: int,
        gradient: np.ndarray,
    ) -> None:
        scale = np.maximum(np.abs(_float64(operands)[i]), 1e-3)
        for _ in range(2):
            direction = self.rng.normal(size=gradient.shape) * scale
            want = self._slope(operands, cotangents, i, direction)
            got = np.vdot(gradient.astype(np.float64), direction)
            size = np.linalg.norm(gradient.astype(np.float64) * direction) + 1e-12
            limit = GRADIENT_TOLERANCE[self.setting.dtype] * size
            assert np.isfinite(got) and abs(got - want) <= limit, (
                f"{self.case.name}: gradient of operand {i} along a direction: got {got}, want {want}"
            )

    def _slope(
        self,
        operands: Sequence[np.ndarray],
        cotangents: Sequence[np.ndarray],
        i: int,
        direction: np.ndarray,
        step: float = 1e-5,
    ) -> float:
        """The central difference of the oracle, times the cotangents, along a direction of operand `i`."""

        def at(t: float) -> float:
            moved = list(_float64(operands))
            moved[i] = moved[i] + t * direction
            pairs = zip(cotangents, _leaves(self.case.oracle(*moved)), strict=True)
            return sum(float(np.vdot(c, y)) for c, y in pairs)

        return (at(step) - at(-step)) / (2 * step)

    def check_stacked(self, transform: _Transform) -> None:
        """Under vmap or scan the result is the stack of the results."""
        sets = [self.operands() for _ in range(3)]
        stacked = [np.stack(xs) for xs in zip(*sets, strict=True)]
        out = jax.jit(transform(self.function()))(*self.put(stacked, leading=(None,)))
        wants = [_leaves(self.case.oracle(*_float64(operands))) for operands in sets]
        self.assert_close(out, tuple(np.stack(ys) for ys in zip(*wants, strict=True)))

    def check_poison(self) -> None:
        """Values that must not matter do not: NaN there changes no bit."""
        operands = self.operands()
        assert self.case.poison is not None
        function = jax.jit(self.function())
        poisoned = self.case.poison(*operands)
        self.assert_equal(function(*self.put(operands)), function(*self.put(poisoned)))

    def assert_equal(self, got: Any, want: Any) -> None:
        """Bit for bit, NaN as NaN."""
        for a, b in zip(_leaves(got), _leaves(want), strict=True):
            np.testing.assert_array_equal(_whole(a), _whole(b), err_msg=self.case.name)

    def assert_close(self, got: Any, want: Any) -> None:
        for x, y in zip(_leaves(got), _leaves(want), strict=True):
            x = _whole(x)
            assert x.shape == np.shape(y), f"{self.case.name}: shape {x.shape}, want {np.shape(y)}"
            error = relative_error(x, y)
            exact = not np.issubdtype(np.asarray(y).dtype, np.inexact)
            limit = 0 if exact else TOLERANCE[self.setting.dtype]
            assert error <= limit, f"{self.case.name}: relative error {error:.2e} > {limit:.0e}"


def _with_gradients(
    function: Callable[..., Any], wrt: Sequence[int], cotangents: Sequence[np.ndarray]
) -> Callable[..., Any]:
    """The result of `function`, and its gradients in the operands `wrt` for one cotangent per leaf of the result."""

    def both(*operands: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        def of(*chosen: jax.Array) -> Any:
            full = list(operands)
            for i, x in zip(wrt, chosen, strict=True):
                full[i] = x
            return function(*full)

        y, vjp = jax.vjp(of, *(operands[i] for i in wrt))
        leaves, tree = jax.tree.flatten(y)
        cotangents_of_y = [_cotangent(c, leaf) for c, leaf in zip(cotangents, leaves, strict=True)]
        return y, vjp(jax.tree.unflatten(tree, cotangents_of_y))

    return both


def compile_partitioned(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program, and its HLO as the partitioner left it.

    XLA:CPU later sends 8-bit and bfloat16 numbers as wider ones, so only this text shows in which dtype they cross
    devices. Never taken from the compilation cache.
    """
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partition.*",
            "xla_dump_hlo_as_text": True,
        }
        compiled = lowered.compile(compiler_options=options)
        (text,) = pathlib.Path(folder).glob("*after_spmd-partitioning*")
        return compiled, text.read_text()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    # Whether there is a cache is decided once, and again after a reset.
    with _config("jax_enable_compilation_cache", False):
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            compilation_cache.reset_cache()


def relative_error(got: ArrayLike, want: ArrayLike) -> float:
    """||got - want|| / ||want||, in float64; the norm of the difference where the norm of `want` is 0."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    norm = np.linalg.norm(want.ravel())
    error = np.linalg.norm((got - want).ravel())
    return float(error / norm) if norm else float(error)


def magnitudes(
    rng: np.random.Generator, shape: Sequence[int], dtype: str = "float32"
) -> np.ndarray:
    """Normal numbers whose rows (all but the last dimension) differ in scale by up to 2^6."""
    scale = 2.0 ** rng.integers(-3, 4, size=(*shape[:-1], 1))
    return np.asarray(rng.normal(size=shape) * scale).astype(jnp.dtype(dtype))


def _make_mesh(setting: Setting) -> jax.sharding.Mesh:
    kind = {
        "explicit": AxisType.Explicit,
        "explicit_set_mesh": AxisType.Explicit,
        "partial_explicit": AxisType.Explicit,
    }.get(setting.mode, AxisType.Auto)
    devices = jax.devices()[: setting.mesh[0] * setting.mesh[1]]
    return jax.make_mesh(setting.mesh, AXES, axis_types=(kind,) * 2, devices=devices)


@contextlib.contextmanager
def _config(name: str, value: object) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _put(x: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _cotangent(value: np.ndarray, like: jax.Array) -> jax.Array:
    """`value` as a cotangent of the traced array `like`: its dtype, its layout."""
    cotangent, sharding = jnp.asarray(value, like.dtype), jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(cotangent, sharding) if explicit else cotangent


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def _float64(operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(
        x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in operands
    )


def _whole(x: ArrayLike) -> np.ndarray:
    """A global array's value, on every process, after its replicas were compared."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    if x.is_fully_addressable:
        whole = np.asarray(x)
    else:
        from jax.experimental import multihost_utils

        whole = np.asarray(multihost_utils.process_allgather(x, tiled=True))
    _assert_replicas_are_equal(x, whole)
    return whole


def _assert_replicas_are_equal(x: jax.Array, whole: np.ndarray) -> None:
    """What this process' devices hold is what the whole array has there, bit for bit.

    An array's layout is only a claim: with `check_vma=False` nothing in JAX compares devices that hold the same part.
    """
    for shard in x.addressable_shards:
        same = np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
        assert same, f"{shard.device} holds another value of {x.sharding} at {shard.index}"

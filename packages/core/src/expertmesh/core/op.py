"""Op: one operation. Everything that JAX needs to know about it follows from a reference and a sharding rule.

This is the only module that knows mesh axis types, `shard_map` and `custom_partitioning`. How a call runs:

| axes of the mesh | how |
|---|---|
| none, or all Manual | the local function: the operands are the shards |
| some Explicit, or Auto with a MeshResource | `shard_map` over all that is not Manual; layouts from types or roles |
| all Auto, no resource | `custom_partitioning`: layouts from the compiler's propagation |
| some Manual, others Auto, no resource | an error: the compiler's hand-over loses the device order there |
"""

import contextlib
import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from expertmesh.core import _jax
from expertmesh.core.mesh import MeshResource, current_resource, global_shard_guard
from expertmesh.core.operands import as_dtype
from expertmesh.core.rule import Plan, Query, parse_rule, parse_terms, plan_by_rule, role_names
from expertmesh.core.specs import (
    Spec,
    axes_of_type,
    axis_size,
    common_axes,
    entry_axes,
    filter_axes,
    local_shape,
    merge_known,
    pad_spec,
    spec_axes,
)
from expertmesh.core.support import (
    INSTALL,
    KernelError,
    no_reason,
    refusal,
    tested_versions,
    triton_unsupported,
    warn_once,
)

__all__ = ["Kernel", "Op", "Plan", "Query", "check_reduce_dtype"]

_REDUCE_DTYPES = ("float32", "bfloat16", "float16")


def check_reduce_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """The dtype of the reduction of a weight's gradient over devices.

    Raises:
      ValueError, TypeError: unsupported dtype, or none; the message begins with `name`.
    """
    resolved = as_dtype(name, "reduce_dtype", dtype)
    if resolved.name not in _REDUCE_DTYPES:
        raise ValueError(
            f"{name}: reduce_dtype must be one of {', '.join(_REDUCE_DTYPES)}; got reduce_dtype={resolved.name}; "
            "use 'float32', or that of the parameters"
        )
    return resolved


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A faster implementation of an op on one platform.

    Attributes:
      name: what `implementation=` calls it.
      platform: "cuda" or "cpu": JAX's platform name at lowering.
      launch: same signature as the op's reference; imports its optional package when called. Same results up to the
        rounding of sums, but for padding rows, which are undefined (`ops/groups.py`).
      unsupported: `unsupported(*operand_types, **options) -> str | None`: why these operands can't be taken.
      unsupported_here: `unsupported_here() -> str | None`: why this installation can't run it, and the remedy.
      takes: `takes(*operands) -> bool`: whether the kernel is for operands of these types. None: for all.
    """

    name: str
    platform: str
    launch: Callable[..., Any]
    unsupported: Callable[..., str | None] = no_reason
    unsupported_here: Callable[[], str | None] = no_reason
    takes: Callable[..., bool] | None = None

    @classmethod
    def triton(
        cls,
        module: str,
        function: str,
        unsupported: Callable[..., str | None],
        takes: Callable[..., bool] | None = None,
    ) -> "Kernel":
        """`function` of `module`, which imports Triton, on NVIDIA GPUs."""
        launch = _Imported(module, function)
        return cls("triton", "cuda", launch, unsupported, triton_unsupported, takes)


@dataclasses.dataclass(frozen=True)
class _Imported:
    """A function whose module is imported when it is called; equal for equal names, so that no op is traced twice."""

    module: str
    function: str

    def __call__(self, *operands: Any, **options: Any) -> Any:
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # of another Triton, a name may be gone
            raise KernelError(f"{self.module} cannot be imported ({error})") from error
        return getattr(module, self.function)(*operands, **options)


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on arrays.

    Attributes:
      name: for messages and profiles.
      reference: `reference(*operands, **options) -> array or tuple of arrays`, pure JAX: the definition, the CPU path,
        the shape rule, the vmap rule, and, unless a kernel replaces it, the function that runs on each shard.
      sharding: a rule of `expertmesh.core.rule`, one term for each operand. Of an operand or result of several arrays,
        such as a QuantizedArray, the term is that of its data; the others follow from it.
      summed, whole: factors of the rule that are not free.
      roles: the role of each dimension for Auto axes under a MeshResource, in the form of `sharding`.
      parameter: index of the term (operands, then results) that is a weight or bias: the axes of the resource's role tp
        in its spec decide before the first operand's.
      plan: `plan(Query) -> Plan`, needed if the rule alone does not say how to partition.
      kernels: faster implementations. Kernels that share a name are for operands of different types.
      results_like: `results_like(*operands, **options) -> tuple of pytrees` with the structure and the ranks of the
        reference's results, None for a result that is absent. A kernel returns the leaves. None: all results are
        arrays.
    """

    name: str
    reference: Callable[..., Any]
    sharding: str
    summed: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    roles: str = ""
    parameter: int | None = None
    plan: Callable[[Query], Plan] | None = None
    kernels: tuple[Kernel, ...] = ()
    results_like: Callable[..., tuple[Any, ...]] | None = None

    def __call__(
        self,
        *operands: Any,
        implementation: Any = "auto",
        operand_specs: Any = None,
        result_specs: Any = None,
        reduce_dtype: Any = "float32",
        **options: Any,
    ) -> Any:
        """Applies the op to global arrays, or to shards inside `shard_map`.

        Args:
          operands: arrays; pytrees with a method `per_leaf`, as QuantizedArray has it; None for one that is absent. The
            reference and the kernels get them so.
          implementation: "auto", "reference" or the name of a kernel; under vmap an op runs its reference.
          operand_specs, result_specs: one PartitionSpec (or None) per operand or result: where an operand is, or a
            result is wanted, if types and roles do not say so.
          reduce_dtype: of an op with the option `out_dtype`: what each device's part of a sum over mesh axes is rounded
            to, and added in.
          options: passed to the reference; hashable.

        Raises:
          ValueError: unknown implementation, or a kernel's name under vmap; unknown reduce_dtype; ranks that do not fit
            the rule, operands on two meshes; given specs with axes that are not in the mesh, an axis twice, or Auto
            axes on a dimension that the type splits over Explicit ones.
          ImportError: the named kernel's package is missing.
          NotImplementedError: Auto axes inside a partly Manual region without a MeshResource; a derivative of the
            op, which only `expertmesh.core.differentiable` can give one; symbolic sizes of `jax.export` where the
            reference needs numbers.
        """
        if self.results_like or not jax.tree_util.all_leaves(operands):
            specs = operand_specs and leaf_specs(operands, operand_specs)
            results = self.results_like and self.results_like(*operands, **options)
            out = self.of_leaves(operands, results, **options)(
                *jax.tree.leaves(operands), implementation=implementation, operand_specs=specs,
                result_specs=result_specs, reduce_dtype=reduce_dtype, **options,
            )  # fmt: skip
            return out if results is None else jax.tree.unflatten(jax.tree.structure(results), out)
        op = dataclasses.replace(self, kernels=self.kernels_for(operands))
        names = ("auto", "reference", *(kernel.name for kernel in op.kernels))
        if implementation not in names:
            raise ValueError(
                f"{self.name}: implementation must be one of {', '.join(names)}; "
                f"got implementation={implementation!r}; use 'auto'"
            )
        call = _Call(
            op,
            implementation,
            None if operand_specs is None else tuple(operand_specs),
            None if result_specs is None else tuple(result_specs),
            check_reduce_dtype(self.name, reduce_dtype),
            tuple(sorted(options.items())),
            current_resource(),
        )
        with _sizes_known(self.name, operands):
            return _run(call, *operands)

    def kernels_for(self, operands: Sequence[Any]) -> tuple[Kernel, ...]:
        """Those for operands of these types."""
        return tuple(k for k in self.kernels if k.takes is None or k.takes(*operands))

    def make_plan(self, query: Query) -> Plan:
        """The plan for what is known; pure, needs no devices."""
        rule = parse_rule(self.sharding, [len(shape) for shape in query.shapes], query.options)
        known = dataclasses.replace(
            query,
            rule=rule,
            whole=rule.expand(self.whole),
            summed=rule.expand(self.summed),
            parameter=self.parameter,
        )
        return self.plan(known) if self.plan else _plan_by_rule(known)

    def of_leaves(
        self, operands: tuple[Any, ...], results: tuple[Any, ...] | None = None, **options: Any
    ) -> "Op":
        """The op whose operands, and results unless they are None, are the leaves of these: of None there are none."""
        tree = jax.tree.structure(operands)
        counts = [len(jax.tree.leaves(x)) for x in operands]
        starts = list(itertools.accumulate(counts, initial=0))
        of_operands = zip(starts, operands, strict=False)
        blocks = tuple((start, x.block) for start, x in of_operands if getattr(x, "block", ()))
        rule = parse_rule(self.sharding, [None if x is None else x.ndim for x in operands], options)
        # What is no tree stands for one leaf.
        sides = operands, results or (tree,) * len(rule.results)
        return dataclasses.replace(
            self,
            reference=_OfTree(self.reference, tree),
            sharding=_leaf_terms(sides, (rule.operands, rule.results), "g"),
            roles=_leaf_terms(sides, role_names(self.roles, self.sharding, rule), "."),
            parameter=_first_leaf(self.parameter, counts, starts),
            plan=_WholeBlocks(self.plan, blocks) if blocks else self.plan,
            kernels=tuple(_of_tree(kernel, tree) for kernel in self.kernels_for(operands)),
            results_like=None,
        )

    def batched(self, in_batched: tuple[bool, ...]) -> "Op":
        """The op over one more leading dimension of the operands for which `in_batched` holds, and of all results."""

        def prepend(text: str, name: str) -> str:
            left, right = map(parse_terms, text.split("->"))
            left = tuple(
                (name,) * batched + term for batched, term in zip(in_batched, left, strict=True)
            )
            sides = (left, tuple((name, *term) for term in right))
            return " -> ".join(", ".join(" ".join(term) or "()" for term in side) for side in sides)

        return Op(
            name=f"{self.name}_batched",
            reference=_BatchedReference(self.reference, in_batched),
            sharding=prepend(self.sharding, _fresh(self.sharding)),
            summed=self.summed,
            whole=self.whole,
            roles=self.roles and prepend(self.roles, "."),
            parameter=self.parameter,
            plan=self.plan and _BatchedPlan(self.plan, in_batched),
        )


@contextlib.contextmanager
def _sizes_known(name: str, operands: Any) -> Iterator[None]:
    """Says which op could not do with symbolic sizes."""
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        raise NotImplementedError(
            f"{name}: the op needs sizes that are known when it is traced; got operands "
            f"{[x.shape for x in jax.tree.leaves(operands)]}; export one program for each size"
        ) from error


def _fresh(sharding: str) -> str:
    """A factor name that the rule does not use; vmap may be nested."""
    used = {name for side in sharding.split("->") for term in parse_terms(side) for name in term}
    return next(f"vmap{i}" for i in range(len(used) + 1) if f"vmap{i}" not in used)


def _per_leaf(x: Any, of_data: tuple[Any, ...], of_groups: Any) -> tuple[tuple[Any, ...], ...]:
    """What `of_data` says of each dimension of an operand, for each of its leaves."""
    if x is None:
        return ()
    leaves: tuple[tuple[Any, ...], ...] = (
        x.per_leaf(of_data, of_groups) if hasattr(x, "per_leaf") else (of_data,)
    )
    return leaves


def _leaf_terms(
    sides: Iterable[Iterable[Any]], terms: Iterable[Iterable[tuple[str, ...]]], group: str
) -> str:
    """A rule, or roles, of the leaves of operands and results; `group`: of a dimension of groups, which no data has."""
    texts = [
        ", ".join(
            " ".join(names) or "()"
            for x, term in zip(values, of_values, strict=True)
            for names in _per_leaf(x, term, group)
        )
        for values, of_values in zip(sides, terms, strict=True)
    ]
    return " -> ".join(texts)


def leaf_specs(
    operands: Iterable[Any], specs: Iterable[PartitionSpec | None]
) -> tuple[PartitionSpec | None, ...]:
    """Where each leaf is, for operands whose data are at `specs`; of the groups of rows each device has all."""
    return tuple(
        None if spec is None else PartitionSpec(*entries)
        for x, spec in zip(operands, specs, strict=True)
        for entries in _per_leaf(x, tuple(spec or ()), None)
    )


@dataclasses.dataclass(frozen=True)
class _OfTree:
    """A function of operands as one of their leaves, and of its results; equal for equal arguments, so that no op is
    traced twice."""

    function: Callable[..., Any]
    tree: jax.tree_util.PyTreeDef

    def __call__(self, *leaves: Any, **options: Any) -> Any:
        out = self.function(*self.tree.unflatten(leaves), **options)
        return tuple(jax.tree.leaves(out)) if isinstance(out, tuple) else out


def _of_tree(kernel: Kernel, tree: jax.tree_util.PyTreeDef) -> Kernel:
    """A kernel of operands as one of their leaves."""
    launch, unsupported = (_OfTree(f, tree) for f in (kernel.launch, kernel.unsupported))
    return dataclasses.replace(kernel, launch=launch, unsupported=unsupported, takes=None)


def _first_leaf(at: int | None, counts: Sequence[int], starts: Sequence[int]) -> int | None:
    """The number of the first leaf of operand `at`, or of result `at` minus the operands; None where it is absent.

    Args:
      counts: of leaves, for each operand.
      starts: the number of each operand's first leaf, and of the first after them all.
    """
    if at is None or at < len(counts) and not counts[at]:
        return None
    return starts[min(at, len(counts))] + max(at - len(counts), 0)


@dataclasses.dataclass(frozen=True)
class _WholeBlocks:
    """A plan that cuts no block: a dimension that does not consist of whole blocks has one scale, so no axis splits it.

    Attributes:
      plan: the op's.
      blocks: (which leaf is the data, their block), the scales' leaf being the next one.
    """

    plan: Callable[[Query], Plan] | None
    blocks: tuple[tuple[int, tuple[int, ...]], ...]

    def __call__(self, query: Query) -> Plan:
        shapes = list(query.shapes)
        for at, block in self.blocks:
            dims = zip(shapes[at], shapes[at + 1], block, strict=True)
            shapes[at + 1] = tuple(n if size % length == 0 else 1 for size, n, length in dims)
        query = dataclasses.replace(query, shapes=tuple(shapes))
        return self.plan(query) if self.plan else _plan_by_rule(query)


def _plan_by_rule(query: Query) -> Plan:
    return plan_by_rule(query, query.rule, query.whole, query.summed, query.parameter)


@dataclasses.dataclass(frozen=True)
class _BatchedReference:
    """A reference under vmap; equal for equal arguments, so that a repeated vmap is not traced again."""

    reference: Callable[..., Any]
    in_batched: tuple[bool, ...]

    def __call__(self, *operands: Any, **options: Any) -> Any:
        in_axes = tuple(0 if batched else None for batched in self.in_batched)
        return jax.vmap(partial(self.reference, **options), in_axes=in_axes)(*operands)


@dataclasses.dataclass(frozen=True)
class _BatchedPlan:
    """A plan under vmap: the batch dimension stays whole."""

    plan: Callable[[Query], Plan]
    in_batched: tuple[bool, ...]

    def __call__(self, query: Query) -> Plan:
        plan = self.plan(self._unbatched(query))
        return dataclasses.replace(
            plan,
            operand_specs=tuple(
                PartitionSpec(None, *spec) if batched else spec
                for spec, batched in zip(plan.operand_specs, self.in_batched, strict=True)
            ),
            result_specs=tuple(PartitionSpec(None, *spec) for spec in plan.result_specs),
        )

    def _unbatched(self, query: Query) -> Query:
        def inner(values: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
            pairs = zip(values, self.in_batched, strict=True)
            return tuple(tuple(v)[1:] if batched else tuple(v) for v, batched in pairs)

        wanted, rule = query.result_specs, query.rule
        results = tuple(names[1:] for names in rule.results)
        return dataclasses.replace(
            query,
            rule=dataclasses.replace(rule, operands=inner(rule.operands), results=results),
            operand_specs=tuple(PartitionSpec(*spec) for spec in inner(query.operand_specs)),
            shapes=inner(query.shapes),
            result_specs=wanted and tuple(PartitionSpec(*tuple(spec)[1:]) for spec in wanted),
        )


_Specs = tuple[PartitionSpec | None, ...] | None
_Mesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static half of a call: part of jit's key."""

    op: Op
    implementation: str
    operand_specs: _Specs
    result_specs: _Specs
    reduce_dtype: jnp.dtype
    options: tuple[tuple[str, object], ...]
    resource: MeshResource | None

    def batched(self, in_batched: tuple[bool, ...]) -> "_Call":
        """The call of the op's `batched`."""
        if self.implementation not in ("auto", "reference"):
            raise ValueError(
                f"{self.op.name}: under vmap, where an op runs its reference, implementation must be 'auto' or "
                f"'reference'; got implementation={self.implementation!r}; use 'auto', or jax.lax.map for vmap"
            )
        return dataclasses.replace(
            self,
            op=self.op.batched(in_batched),
            operand_specs=_prepended(self.operand_specs, in_batched),
            result_specs=_prepended(self.result_specs, [True] * len(self.result_specs or ())),
        )


def _prepended(specs: _Specs, batched: Sequence[bool]) -> _Specs:
    """The specs, those that are batched with one more dimension ahead, which stays whole."""
    return specs and tuple(
        PartitionSpec(None, *spec) if b and spec is not None else spec
        for spec, b in zip(specs, batched, strict=True)
    )


@partial(jax.jit, static_argnums=0)
def _run(call: _Call, *operands: jax.Array) -> Any:
    @custom_vmap
    def run(*operands: jax.Array) -> Any:
        # JAX traces this again when it batches or differentiates, and not always where the call is.
        with global_shard_guard(call.resource):
            return _dispatch(call, operands)

    @run.def_vmap
    def run_batched(axis_size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
        del axis_size
        out = _run(call.batched(tuple(in_batched)), *operands)
        return out, jax.tree.map(lambda _: True, out)

    return _without_derivative(call.op.name, run)(*operands)


def _without_derivative(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose derivative is an error that names the op; the empty tangents of integers pass."""
    guarded = jax.custom_jvp(function)

    def jvp(primals: Any, tangents: Any) -> Any:
        if not all(isinstance(tangent, SymbolicZero) for tangent in tangents):
            raise NotImplementedError(
                f"{name}: the op itself has no derivative; got one asked for, as by a gradient of a gradient or by "
                "forward mode; differentiate once and in reverse, and an Op of your own through `differentiable`"
            )
        out = guarded(*primals)
        return out, jax.tree.map(partial(zero_from_primal, symbolic_zeros=True), out)

    guarded.defjvp(jvp, symbolic_zeros=True)
    return guarded


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a call is made: a mesh, whose axes are Auto, Explicit or Manual, and the MeshResource in context."""

    mesh: _Mesh
    resource: MeshResource | None
    auto: frozenset[str]
    explicit: frozenset[str]
    manual: frozenset[str]

    @classmethod
    def of(cls, name: str, operands: tuple[jax.Array, ...]) -> "_Place":
        """That of op `name` on these operands."""
        mesh = _jax.operand_mesh(name, operands)
        kinds = AxisType.Auto, AxisType.Explicit, AxisType.Manual
        axes = (frozenset(axes_of_type(mesh, kind)) for kind in kinds)
        return cls(mesh, current_resource(), *axes)

    @property
    def free_shape(self) -> dict[str, int]:
        """The sizes of the axes that are not Manual."""
        return {axis: size for axis, size in self.mesh.shape.items() if axis not in self.manual}


def _dispatch(call: _Call, operands: tuple[jax.Array, ...]) -> Any:
    place = _Place.of(call.op.name, operands)
    if not place.mesh.empty and len(place.manual) == len(place.mesh.axis_names):
        return _local(call, operands)
    if place.explicit or place.resource is not None and not place.mesh.empty:
        return _on_shards(call, operands, place)
    if place.manual:
        raise NotImplementedError(
            f"{call.op.name}: inside a shard_map over some axes, the other axes must be Explicit or named by a "
            f"MeshResource; got Manual {sorted(place.manual)} and Auto {sorted(place.auto)}; "
            "call it under global_shard_guard(MeshResource(...)), or make the axes Explicit or all of them Manual"
        )
    return _partitioned(call, operands)


def _local(
    call: _Call, operands: tuple[jax.Array, ...], overrides: Mapping[str, Any] | None = None
) -> Any:
    """The op on what the operands hold, everything or one device's shards, by a kernel that can take them."""
    options = {**dict(call.options), **(overrides or {})}
    reference = partial(call.op.reference, **options)
    usable: dict[str, Callable[..., Any]] = {}
    platform = _jax.platform(operands)
    for kernel in call.op.kernels:
        named = call.implementation == kernel.name
        # A kernel of another platform is not even traced, so that its package is not imported.
        chosen = call.implementation == "auto" and kernel.platform == platform
        if not named and not chosen:
            continue
        missing, elsewhere = kernel.unsupported_here(), None
        if kernel.platform != platform:
            elsewhere = f"it runs on {kernel.platform}, and the operands are on {platform}"
        types = map(jax.typeof, operands)
        reason = missing or elsewhere or kernel.unsupported(*types, **options)
        if reason is None:
            usable.setdefault(kernel.platform, partial(_launch, call, kernel, reference, options))
        elif named:
            message = refusal(call.op.name, "implementation", kernel.name, reason)
            raise (ImportError if missing else ValueError)(message)
        elif missing:
            warnings.warn(f"{call.op.name}: using the reference: {reason}", stacklevel=2)
    if not usable:
        return reference(*operands)
    return jax.lax.platform_dependent(*operands, default=reference, **usable)


def _launch(
    call: _Call,
    kernel: Kernel,
    reference: Callable[..., Any],
    options: Mapping[str, Any],
    *operands: jax.Array,
) -> Any:
    """The kernel's results; under "auto" the reference's where the kernel cannot be compiled or loaded."""
    try:
        return vary_like(operands, kernel.launch(*operands, **options))
    except KernelError as error:
        reason = f"{error}; with {tested_versions()} it was tested (`{INSTALL}`)"
        if call.implementation == kernel.name:
            message = refusal(call.op.name, "implementation", kernel.name, reason)
            raise KernelError(message) from error
        warn_once(f"{call.op.name}: using the reference: {reason}")
        return reference(*operands)


def vary_like(operands: Iterable[jax.Array], results: Any) -> Any:
    """Results of a custom call or a nested shard_map, which lose the Manual axes over which the operands vary."""
    axes = frozenset().union(*map(_jax.varying_axes, operands))
    return _jax.match_varying(results, axes)


def _shard_function(call: _Call, plan: Plan) -> Callable[..., Any]:
    """What runs on each device: the local op, then the sums of its partial results.

    An op that rounds its result has an `out_dtype`; partial sums are made and added in the call's `reduce_dtype`, and
    rounded once more.
    """
    options = dict(call.options)
    wide = "out_dtype" in options and any(plan.summed_axes)

    def local(*shards: jax.Array) -> Any:
        overrides = {**plan.options, **({"out_dtype": call.reduce_dtype} if wide else {})}
        out = _reduce(plan, _local(call, shards, overrides))
        return jax.tree.map(lambda x: x.astype(options["out_dtype"]), out) if wide else out

    return local


def _reduce(plan: Plan, out: Any) -> Any:
    """Sums the local results over the plan's axes: scattered where the result's spec has the axis, else to all."""
    single = not isinstance(out, tuple)
    results = []
    summed = plan.summed_axes or ((),) * len(plan.result_specs)
    for x, spec, axes in zip((out,) if single else out, plan.result_specs, summed, strict=True):
        for dim, entry in enumerate(spec):
            scatter = common_axes(entry, axes)
            if scatter:
                x = jax.lax.psum_scatter(x, scatter, scatter_dimension=dim, tiled=True)
        rest = tuple(axis for axis in axes if axis not in spec_axes(spec))
        results.append(jax.lax.psum(x, rest) if rest else x)
    return results[0] if single else tuple(results)


def _on_shards(call: _Call, operands: tuple[jax.Array, ...], place: _Place) -> Any:
    """Inside a shard_map over every axis that is not Manual."""
    _check_resource(call.op.name, place)
    plan = _plan_on(call, operands, place)
    placed = [
        _reshard(x, place.mesh, filter_axes(spec, place.explicit))
        for x, spec in zip(operands, plan.operand_specs, strict=True)
    ]
    held = [i for i, x in enumerate(placed) if x.size]
    function = _shard_function(call, plan)
    shards = _jax.shard_map(
        call.op.name,
        _with_empty(function, placed, plan.operand_specs, place.free_shape),
        mesh=place.mesh,
        axis_names=place.explicit | place.auto,
        in_specs=tuple(plan.operand_specs[i] for i in held),
        out_specs=_one_or_all(plan.result_specs),
        check_vma=False,
    )
    results = shards(*(placed[i] for i in held))
    return vary_like(placed, results)


def _plan_on(call: _Call, operands: tuple[jax.Array, ...], place: _Place) -> Plan:
    """The plan over the axes that are not Manual, after the errors and warnings of specs."""
    rule = parse_rule(call.op.sharding, [x.ndim for x in operands], dict(call.options))
    operand_names, result_names = role_names(call.op.roles, call.op.sharding, rule)
    operand_roles = [_ordered_role_spec(roles, place) for roles in operand_names]
    result_roles = [_role_spec(roles, place, place.auto) for roles in result_names]
    query = Query(
        operand_specs=_known_specs(call, operands, operand_roles, place),
        shapes=tuple(x.shape for x in operands),
        result_specs=_wanted_specs(call, result_roles, place.mesh),
        mesh_shape=place.free_shape,
        options=dict(call.options),
        resource=place.resource,
    )
    plan = call.op.make_plan(query)
    _warn_of_idle_axes(call.op.name, plan.idle_axes, query.operand_specs)
    # A sum over an axis of one device is none, and would widen what is summed.
    summed = [tuple(a for a in axes if place.free_shape[a] > 1) for axes in plan.summed_axes]
    return dataclasses.replace(plan, summed_axes=tuple(summed))


def _known_specs(
    call: _Call, operands: tuple[jax.Array, ...], by_role: Sequence[PartitionSpec], place: _Place
) -> tuple[PartitionSpec, ...]:
    """Where operands are: by their types over Explicit axes; over Auto ones as the caller says, or by their roles."""
    told = call.operand_specs or (None,) * len(operands)
    for x, want in zip(operands, told, strict=True):
        if want is not None:
            _check_axes(call.op.name, want, place.mesh)
            _check_order(call.op.name, want, x, place.auto)
    typed = [filter_axes(jax.typeof(x).sharding.spec, place.explicit) for x in operands]
    return tuple(
        merge_known(type_, role if want is None else want, place.auto, x.ndim)
        for x, type_, role, want in zip(operands, typed, by_role, told, strict=True)
    )


def _wanted_specs(
    call: _Call, by_role: Sequence[PartitionSpec], mesh: _Mesh
) -> tuple[PartitionSpec, ...]:
    """Where results are wanted: as the caller says, or by their roles."""
    wanted = call.result_specs or (None,) * len(by_role)
    for want in wanted:
        _check_axes(call.op.name, want or (), mesh)
    return tuple(
        role if want is None else pad_spec(want, len(role))
        for want, role in zip(wanted, by_role, strict=True)
    )


def _warn_of_idle_axes(
    name: str, axes: Iterable[str], operand_specs: Sequence[PartitionSpec]
) -> None:
    for axis in axes:
        warnings.warn(
            f"{name}: axis {axis!r} shards an operand and not the work: the operand is gathered over it, and its "
            f"devices all do the same; got operands {list(operand_specs)}; shard other dimensions, or give the axis "
            "a role",
            RuntimeWarning,
            stacklevel=4,
        )


def _with_empty(
    function: Callable[..., Any],
    operands: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    mesh_shape: Mapping[str, int],
) -> Callable[..., Any]:
    """`function` of the operands that hold something; XLA crashes on empty buffers that enter a shard_map."""
    shapes = [
        local_shape(x.shape, spec, mesh_shape) for x, spec in zip(operands, specs, strict=True)
    ]

    def local(*shards: jax.Array) -> Any:
        remaining = iter(shards)
        return function(
            *(
                next(remaining) if x.size else jnp.zeros(shape, x.dtype)
                for x, shape in zip(operands, shapes, strict=True)
            )
        )

    return local


def _check_resource(name: str, place: _Place) -> None:
    mesh, resource = place.mesh, place.resource
    if resource is None:
        stray = [axis for axis in place.auto if mesh.shape[axis] > 1]
        if stray:
            raise NotImplementedError(
                f"{name}: on a mesh with Explicit axes, Auto axes must be named by a MeshResource; got Auto "
                f"{sorted(stray)}; call it under global_shard_guard(MeshResource(...)), or make every axis Explicit"
            )
        return
    missing = [axis for axis in resource.all_axes() if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{name}: a MeshResource must name axes of the mesh; got {missing}, mesh axes {mesh.axis_names}; "
            "rename them or build the mesh with them"
        )


def _check_axes(name: str, spec: Spec, mesh: _Mesh) -> None:
    """A given spec must name axes of the mesh, each once."""
    axes = spec_axes(spec)
    axis_size(mesh.shape, axes)
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"{name}: a spec must name an axis once; got spec={spec}, {sorted(a for a in axes if axes.count(a) > 1)}; "
            "shard one dimension only with it, over several axes with a tuple such as ('ep', 'fsdp')"
        )


def _check_order(name: str, spec: Spec, x: jax.Array, auto: frozenset[str]) -> None:
    """A given spec must not leave open in which order Explicit and Auto axes cut a dimension."""
    types = pad_spec(jax.typeof(x).sharding.spec, x.ndim)
    for dim, (typed, entry) in enumerate(zip(types, pad_spec(spec, x.ndim), strict=True)):
        more = [axis for axis in entry_axes(entry) if axis in auto]
        if more and not set(entry_axes(typed)) <= set(entry_axes(entry)):
            raise ValueError(
                f"{name}: a spec must name all axes of a dimension; got spec={spec}, axes {more} in dimension {dim}, "
                f"which the operand's type splits over {typed!r}; write the tuple of all its axes, major first"
            )


def _ordered_role_spec(roles: Sequence[str], place: _Place) -> PartitionSpec:
    """Roles over Auto axes, and where these are among the Explicit ones, which a type names without them."""
    auto, free = (_role_spec(roles, place, axes) for axes in (place.auto, place.free_shape))
    return PartitionSpec(*(entry if own else None for own, entry in zip(auto, free, strict=True)))


def _role_spec(roles: Sequence[str], place: _Place, axes: Collection[str]) -> PartitionSpec:
    """Roles over these axes."""
    if place.resource is None:
        return PartitionSpec(*[None] * len(roles))
    return filter_axes([place.resource.entry(role) for role in roles], axes)


def _reshard(x: jax.Array, mesh: _Mesh, spec: PartitionSpec) -> jax.Array:
    if (
        AxisType.Explicit not in mesh.axis_types
        or pad_spec(jax.typeof(x).sharding.spec, x.ndim) == spec
    ):
        return x
    placed: jax.Array = jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return placed


def _partitioned(call: _Call, operands: tuple[jax.Array, ...]) -> Any:
    """Under the compiler's own propagation, which asks for a plan when it has chosen the layouts."""
    rule = parse_rule(call.op.sharding, [x.ndim for x in operands], dict(call.options))

    def whole_program(*operands: jax.Array) -> Any:
        return _local(call, operands)

    function, plans = custom_partitioning(whole_program), _CompilersPlans(call)
    function.def_partition(
        partition=plans.partition,
        infer_sharding_from_operands=plans.result_shardings,
        sharding_rule=_jax.shardy_rule(rule.operands, rule.results),
    )
    return jax.tree.map(_shield, function(*operands))


@dataclasses.dataclass(frozen=True)
class _CompilersPlans:
    """What the compiler asks of a call; operands and results come as infos: shapes, and the layouts that it chose."""

    call: _Call

    def partition(
        self, mesh: Mesh, operand_infos: Sequence[Any], result_infos: Any
    ) -> tuple[Any, ...]:
        """(mesh, what runs on each device, layouts of results, layouts of operands)."""
        plan = self._plan(mesh, operand_infos, jax.tree.leaves(result_infos))
        function = _shard_function(self.call, plan)

        def local(*shards: jax.Array) -> Any:
            # Ops that the local function calls must see shards, whatever the ambient mesh is.
            with jax.sharding.use_abstract_mesh(_jax.manual_mesh(mesh)):
                return function(*shards)

        operands = _shardings(mesh, plan.operand_specs)
        return mesh, local, _one_or_all(_shardings(mesh, plan.result_specs)), operands

    def result_shardings(self, mesh: Mesh, operand_infos: Sequence[Any], result_infos: Any) -> Any:
        """Where the results are best, for these operands."""
        del result_infos
        plan = self._plan(mesh, operand_infos, ())
        return _one_or_all(_shardings(mesh, plan.result_specs))

    def _plan(self, mesh: Mesh, operand_infos: Sequence[Any], results: Sequence[Any]) -> Plan:
        decided = _known(results)
        return self.call.op.make_plan(
            Query(
                operand_specs=tuple(_info_spec(info) for info in operand_infos),
                shapes=tuple(info.shape for info in operand_infos),
                result_specs=tuple(map(_info_spec, results)) if decided else None,
                mesh_shape=dict(mesh.shape),
                options=dict(self.call.options),
                results_decided=decided,
            )
        )


def _shardings(mesh: Mesh, specs: Iterable[PartitionSpec]) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, spec) for spec in specs)


def _one_or_all(results: tuple[Any, ...]) -> Any:
    """An op's result, or its results."""
    return results[0] if len(results) == 1 else results


def _shield(x: jax.Array) -> jax.Array:
    """Keeps integers off XLA:GPU's division rewrite: it copies the call's rule to ops that the rule does not fit."""
    return jax.lax.optimization_barrier(x) if jnp.issubdtype(x.dtype, jnp.integer) else x


def _known(result_infos: Sequence[Any]) -> bool:
    return bool(result_infos) and all(
        getattr(info, "sharding", None) is not None for info in result_infos
    )


def _info_spec(info: Any) -> PartitionSpec:
    spec = getattr(info.sharding, "spec", PartitionSpec())
    return pad_spec(spec, len(info.shape))

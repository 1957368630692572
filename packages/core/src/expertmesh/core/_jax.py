"""Every difference between the supported versions of JAX, Triton and jax-triton, and what is used of them that is not
public. ci/matrix.toml has a cell for each pair of versions.

* `has_jax_triton`: jax-triton 0.4.1 runs with jax < 0.12; its rule for dead code lacks an argument that jax 0.12 gives.
* `compile_triton`: triton 3.8 and 3.9 document no compiler ahead of time; the swizzles that it chooses for descriptors
  stand in its metadata alone.
* `coordination_service`: what `jax.distributed.initialize` begins; JAX has no other way to find a process that is late.
* `varying_axes`: all versions of JAX, whose types do not show these axes otherwise.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax._src import distributed
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

MIN_JAX = (0, 11, 2)
if jax.__version_info__ < MIN_JAX:
    raise ImportError(
        f"expertmesh.core: jax must be >= {'.'.join(map(str, MIN_JAX))}; got jax={jax.__version__}; "
        "upgrade with `pip install -U jax`"
    )


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which `x` differs from device to device (shard_map's check_vma)."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_varying(operands: Any, axes: frozenset[str] = frozenset()) -> Any:
    """Casts every array of a pytree to vary over `axes` and over all axes that any of them varies over."""
    leaves, tree = jax.tree.flatten(operands)
    union = axes.union(*map(varying_axes, leaves))
    leaves = [_vary(x, union - varying_axes(x)) for x in leaves]
    return jax.tree.unflatten(tree, leaves)


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _meshes(operands: Sequence[Any]) -> list[AbstractMesh]:
    """The meshes in the operands' types, else the mesh in context; empty ones only where there is no other."""
    found = [jax.typeof(x).sharding.mesh for x in operands]
    return [mesh for mesh in found if not mesh.empty] or [jax.sharding.get_abstract_mesh()]


def operand_mesh(name: str, operands: Sequence[Any]) -> AbstractMesh:
    """The mesh in the operands' types, else the mesh in context; empty where there is none.

    Raises:
      ValueError: names `name`; for operands on two meshes that are not both all Auto, as JAX's own ops do.
    """
    first, *others = _meshes(operands)
    for mesh in others:
        if mesh != first and not (mesh.are_all_axes_auto and first.are_all_axes_auto):
            raise ValueError(
                f"{name}: the operands must be on one mesh; got {first} and {mesh}; jax.device_put those of one mesh "
                "to the other"
            )
    return first


def platform(operands: Sequence[Any]) -> str:
    """JAX's lowering platform of the devices that the operands' mesh consists of, else of the default ones."""
    device = _meshes(operands)[0].abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "cuda" if name == "gpu" else name


class Store(Protocol):
    """Texts by key, which all processes of a job share."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Says it, once for each key unless that may be overwritten."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All that was said under keys that begin so."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """What was said, or will be in time; else JaxRuntimeError, DEADLINE_EXCEEDED."""


def coordination_service() -> Store | None:
    """None in a job of one process."""
    store: Store | None = distributed.global_state.client
    return store


def local_gpu() -> jax.Device | None:
    """This process' first NVIDIA GPU; None where it has none, as when compiling ahead of time.

    Raises:
      ValueError: another GPU of the process has another compute capability: it would run the first one's kernels.
    """
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    found = sorted({gpu.compute_capability for gpu in gpus}, key=float)
    if len(found) > 1:
        raise ValueError(
            "local_gpu: a process' GPUs must have one compute capability, for which kernels are compiled; "
            f"got {', '.join(found)}; name GPUs of one kind in CUDA_VISIBLE_DEVICES"
        )
    return gpus[0]


def compute_capability() -> float | None:
    """Of `local_gpu`."""
    gpu = local_gpu()
    return float(gpu.compute_capability) if gpu else None


def target_capability() -> float:
    """The one that kernels are compiled for; an H100's where there is no GPU."""
    return compute_capability() or 9.0


def runs_hopper_kernels() -> bool:
    """Whether kernels are compiled for a Hopper GPU."""
    return target_capability() == 9.0


def shard_map(name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.shard_map`, whose error for a mapped axis names `name`: under `vmap` JAX takes the Explicit axes away that
    split the mapped dimension, and the operands' types still have them."""

    def call(*operands: Any) -> Any:
        try:
            return jax.shard_map(function, **options)(*operands)
        except ValueError as error:
            if "to be a subset of mesh.axis_names" not in str(error):
                raise
            raise ValueError(
                f"{name}: a dimension that vmap maps must not be split over an Explicit axis; the operands' mesh has "
                f"{sorted(options['axis_names'])}; make it a dimension of tokens, [..., D], or replicate it with "
                "jax.sharding.reshard"
            ) from error

    return call


def manual_mesh(mesh: Any) -> AbstractMesh:
    """The same axes, all Manual: what code on one device's shards must see as its context."""
    abstract = getattr(mesh, "abstract_mesh", mesh)
    return AbstractMesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=(AxisType.Manual,) * len(mesh.axis_names),
        abstract_device=abstract.abstract_device,
    )


def operand_types(operands: Any) -> Any:
    """Types that a cotangent must have; None where an operand is absent."""
    return jax.tree.map(jax.typeof, operands)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """The spec in the operand's type, or None where no axis of its mesh is Explicit."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def shardy_rule(operands: Any, results: Any) -> SdyShardingRule:
    """The compiler's form of a rule; its mapping type is not public, tuples of names are what it holds."""
    return SdyShardingRule(operands, results)


@functools.cache
def has_jax_triton() -> bool:
    """Whether jax-triton is installed, and its `triton_call` works with the installed JAX."""
    works = jax.__version_info__ < (0, 12)
    return works and importlib.util.find_spec("jax_triton") is not None


def jax_triton_call(*operands: Any, **options: Any) -> Any:
    """`jax_triton.triton_call`, for an installation without our launcher, whose `TensorMap`s are descriptors there."""
    import jax_triton

    taken = [
        jax_triton.TensorDescriptor(x.base, x.shape, x.strides, x.box) if hasattr(x, "box") else x
        for x in operands
    ]
    return jax_triton.triton_call(*taken, **options)


@functools.cache
def compile_triton(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
    capability: int,
    form: str = "cubin",
) -> Any:
    """A kernel's code, from Triton's cache on disk if it is there.

    Args:
      kernel: a function under `triton.jit`.
      types: (name, Triton's type) of the parameters that are no constants; pointers are aligned to 16 bytes.
      constants, options: pairs; the latter are Triton's.
      capability: compute capability to compile for, times ten.
      form: "cubin", machine code of that capability; "ptx", which the driver compiles for later ones too.

    Returns:
      (name, code, threads of a block, bytes of shared memory), and (box, bytes of swizzle) of each descriptor.

    Raises:
      Exception: whatever Triton raises where it cannot compile the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds, values = dict(types), dict(constants)
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if kinds.get(name, "")[:1] == "*"
    }
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), dict(options))
    found = compiled.metadata
    if found.global_scratch_size or found.profile_scratch_size:
        raise NotImplementedError(f"{found.name} asks for memory, which a launch does not give")
    swizzles = {0: 0, 1: 32, 2: 64, 3: 128}
    maps = tuple(
        (tuple(of["block_size"]), swizzles[of["swizzle"]]) for of in found.tensordesc_meta or ()
    )
    code = compiled.asm[form]
    code = code if isinstance(code, bytes) else f"{code}\0".encode()
    return (found.name, code, 32 * found.num_warps, found.shared), maps

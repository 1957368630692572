"""Golden values: the bits of ops, layers and the block, to compare a refactoring with the commit before it.

    python tests/golden.py record [FOLDER]     write results and gradients of all settings
    python tests/golden.py compare [FOLDER]    run them again; print which arrays differ, and by how much
        --only PATTERN                         of the settings whose name has the pattern
        --full                                 every setting of the block, not a pair of each two options

FOLDER is runs/golden unless it is named. A setting is an array of a program: a case of the contract on one device and
sharded, a layer in a recipe, or the block. Operands are NumPy's, alike on each machine, their rows of other magnitudes;
everything runs on 8 virtual CPU devices, by public functions only. "differs by" is the largest difference divided by
the largest value. Bits are those of one version of JAX and one kind of CPU: compare where you recorded.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import core, ep
from cases.virtual import use_virtual_devices
from expertmesh.core import (
    RECIPES,
    Activation,
    DelayedScaling,
    MeshResource,
    dense,
    global_shard_guard,
    grouped_dense,
    init_dense_state,
    quantize_weight,
)
from expertmesh.core.testing import OpCase
from expertmesh.flax_moe import MoEConfig, init_quant_state, moe, param_shapes, param_specs

ROOT = pathlib.Path(__file__).resolve().parents[1]
Arrays = dict[str, np.ndarray]
SPREAD = 6  # powers of 2 between the smallest and the largest rows


@dataclasses.dataclass(frozen=True)
class Setting:
    """One program.

    Attributes:
      name: unique.
      run: `run()`, its results and gradients by name.
    """

    name: str
    run: Callable[[], Arrays]


def draw(name: str) -> np.random.Generator:
    """Of a setting or an operand; alike in each process."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def numbers(rng, shape, dtype="float32") -> np.ndarray:
    """Normal; rows (all but the last dimension) differ by powers of 2."""
    scale = 2.0 ** rng.integers(-SPREAD // 2, SPREAD // 2 + 1, size=(*shape[:-1], 1))
    return np.asarray(rng.normal(size=shape) * scale).astype(jnp.dtype(dtype))


def mesh_of(mode: str, axes: Mapping[str, int]):
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def with_gradients(function, wrt, rng):
    """`of(*operands)`: results, and gradients for cotangents of this draw, by name."""

    def of(*operands):
        def floats_and_others(*chosen):
            chosen = dict(zip(wrt, chosen, strict=True))
            leaves = named(function(*(chosen.get(i, x) for i, x in enumerate(operands))))
            floats = {k: x for k, x in leaves.items() if x.dtype in FLOATS}
            return floats, {k: x for k, x in leaves.items() if k not in floats}

        chosen = tuple(operands[i] for i in wrt)
        floats, pull, others = jax.vjp(floats_and_others, *chosen, has_aux=True)
        gradients = pull({k: cotangent(rng, x) for k, x in floats.items()}) if wrt else ()
        return floats | others | named({f"d{i}": g for i, g in zip(wrt, gradients, strict=True)})

    return of


FLOATS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def cotangent(rng, like):
    """Laid out like the traced array `like`."""
    value, sharding = numbers(rng, (*like.shape, 1))[..., 0], jax.typeof(like).sharding
    value = jnp.asarray(value, like.dtype)
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(value, sharding) if explicit else value


def named(tree) -> dict:
    """The leaves of a tree by their paths."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}


def as_numpy(results) -> Arrays:
    return {k: np.asarray(x) for k, x in results.items()}


# ---- the cases of the contract

CASE_AXES = {"a": 2, "b": 4}
CASE_RESOURCE = MeshResource(fsdp_resource="a", ep_resource="b")


def of_case(case: OpCase, mode: str, size: str, dtype: str) -> Setting:
    """On one device, or over (a, b)."""
    name = f"{case.name} {mode} {size} {dtype}"
    specs = case.layouts["tuple"]
    resource = mode == "resource" or (case.exchanges and mode not in ("single", "auto"))

    def run():
        operands = case.operands(draw(name), size, dtype)
        function = with_gradients(case.function, case.wrt, draw(f"{name} cotangents"))
        if mode != "single":
            mesh = mesh_of(mode, CASE_AXES)
            shardings = [NamedSharding(mesh, spec) for spec in specs]
            operands = jax.device_put(tuple(map(np.asarray, operands)), tuple(shardings))
        with global_shard_guard(CASE_RESOURCE if resource else None):
            return as_numpy(jax.jit(function)(*operands))

    return Setting(name, run)


def of_cases() -> Iterator[Setting]:
    modes = itertools.cycle(("explicit", "resource", "auto"))
    for case in core.CASES:
        yield of_case(case, "single", "regular", "float32")
        yield of_case(case, "single", "odd", "bfloat16")
        yield of_case(case, next(modes), "regular", "bfloat16")
    for case in ep.CASES:
        for mode in ("single", "explicit", "resource", "auto"):
            yield of_case(case, mode, "odd", "float32" if mode == "explicit" else "bfloat16")


# ---- the layers

ROWS, K, N, EXPERTS = 4, 256, 128, 4


def of_layer(name: str, recipe: str, copies: bool) -> Setting:
    """A layer in a recipe on one device; its weight quantized before, or not."""
    grouped, chosen = name == "grouped_dense", RECIPES[recipe]()
    title = f"{name} {recipe}{' of a QuantizedWeight' * copies}"
    delayed = isinstance(chosen, DelayedScaling)

    def operands(rng):
        x = numbers(rng, (1, 128 * ROWS, K), "bfloat16")
        lead = (EXPERTS,) * grouped
        sizes = np.array([[128, 0, 256, 100]], np.int32)
        return x, numbers(rng, (*lead, K, N)), numbers(rng, (*lead, N)), *([sizes] * grouped)

    def layer(x, w, bias, *sizes):
        more = dict(recipe=chosen, key=jnp.arange(2, dtype=jnp.uint32))
        if delayed:
            experts = dict(num_experts=EXPERTS) if grouped else {}
            more |= dict(state=init_dense_state(chosen, **experts))
        if copies:
            more |= dict(weight_quantized=quantize_weight(w, chosen, batch_dims=int(grouped)))
        return grouped_dense(x, w, *sizes, bias, **more) if grouped else dense(x, w, bias, **more)

    def run():
        function = with_gradients(layer, (0, 1, 2), draw(f"{title} cotangents"))
        return as_numpy(jax.jit(function)(*operands(draw(title))))

    return Setting(title, run)


def of_layers() -> Iterator[Setting]:
    for name, recipe in itertools.product(("dense", "grouped_dense"), RECIPES):
        for copies in (False,) if recipe == "fp8_delayed" else (False, True):
            yield of_layer(name, recipe, copies)


# ---- the block

AXES = {"fsdp": 2, "ep": 2, "tp": 2}
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep", tp_resource="tp")
TOKENS = P(("fsdp", "ep"))
B, S, D = 8, 32, 256
BLOCK = dict(num_experts=4, top_k=2, expert_dim=256, aux_loss_coeff=0.5, z_loss_coeff=0.25)
OPTIONS: Mapping[str, tuple] = {
    "recipe": (None, *RECIPES),
    "mode": ("single", "explicit", "resource", "auto", "manual"),
    "transport": ("local", "ring", "all_to_all"),
    "bias": (False, True),
    "mask": (False, True),
    "capacity": (None, 1.0),
    "form": ("plain", "chunks", "shared", "no gate"),
}
FORMS: Mapping[str, Mapping] = {
    "plain": {},
    "chunks": dict(num_chunks=2),
    "shared": dict(shared_expert_dim=256),
    "no gate": dict(activation=Activation(function="gelu", gated=False)),
}


@dataclasses.dataclass(frozen=True)
class Block:
    """One value of each of OPTIONS."""

    recipe: str | None
    mode: str
    transport: str
    bias: bool
    mask: bool
    capacity: float | None
    form: str

    def __str__(self):
        words = [
            f"recipe {self.recipe}",
            self.mode,
            self.transport,
            "bias" * self.bias,
            "mask" * self.mask,
        ]
        words += [f"capacity {self.capacity}" if self.capacity else "", self.form]
        return "moe " + ", ".join(filter(None, words))

    @property
    def config(self) -> MoEConfig:
        options = BLOCK | dict(transport=self.transport, capacity_factor=self.capacity)
        options |= dict(recipe=self.recipe, use_bias=self.bias, ep_axis=self._ep_axis())
        return MoEConfig(**options | FORMS[self.form])

    def _ep_axis(self):
        return "ep" if self.mode in ("explicit", "manual") else None

    def specs(self) -> dict:
        """Of the parameters; where the axes are Manual, the experts alone are split."""
        resource = MeshResource(ep_resource="ep") if self.mode == "manual" else RESOURCE
        return param_specs(self.config, resource)


def _block(setting: Block, params, x, mask):
    """What is differentiable, and the choices."""
    config = setting.config
    state, key = init_quant_state(config), jnp.arange(2, dtype=jnp.uint32)
    out = moe(params, x, config, token_mask=mask, quant_state=state, key=key)
    if setting.mode == "manual":  # numbers of a shard's tokens alone are no global arrays
        return out.y, out.topk_idx
    return out._replace(overflow=None)


def of_block(setting: Block) -> Setting:
    name = str(setting)

    def operands():
        shapes = param_shapes(D, setting.config)
        params = {k: numbers(draw(k), shape) / 16 for k, shape in shapes.items()}
        mask = draw("mask").random((B, S)) < 0.8 if setting.mask else None
        return params, numbers(draw("x"), (B, S, D), "bfloat16"), mask

    def run():
        function = lambda *operands: _block(setting, *operands)  # noqa: E731
        given, specs = operands(), (setting.specs(), TOKENS, TOKENS if setting.mask else None)
        if setting.mode != "single":
            mesh = mesh_of(setting.mode, AXES)
            put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
            given = jax.tree.map(put, given, specs)
        if setting.mode == "manual":
            results = (TOKENS, TOKENS)
            function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results)
        function = with_gradients(function, (0, 1), draw(f"{name} cotangents"))
        with global_shard_guard(RESOURCE if setting.mode == "resource" else None):
            return as_numpy(jax.jit(function)(*given))

    return Setting(name, run)


def of_blocks(full: bool) -> Iterator[Setting]:
    """Every block, or few in which each two options meet."""
    every = [Block(*values) for values in itertools.product(*OPTIONS.values())]
    every = [block for block in every if valid(block)]
    return map(of_block, every if full else covering([b for b in every if quick(b)]))


def valid(block: Block) -> bool:
    whole = block.mode in ("single", "auto")
    # A shard's state is of its experts.
    by_shard = block.mode == "manual" and block.recipe == "fp8_delayed"
    return whole == (block.transport == "local") and not by_shard


def quick(block: Block) -> bool:
    """What compiles long is left to --full: recipes where nothing is special to them."""
    if block.recipe == "nvfp4":
        return block.mode in ("single", "resource") and block.form == "plain"
    return block.mode in ("single", "explicit", "resource") or block.recipe in (None, "fp8_block")


def covering(blocks: list[Block]) -> list[Block]:
    """Greedily: the next is a block with most pairs that none has had."""
    pairs = {b: set(itertools.combinations(enumerate(dataclasses.astuple(b)), 2)) for b in blocks}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(blocks, key=lambda block: len(pairs[block] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


# ---- record and compare


def settings(pattern: str, full: bool) -> list[Setting]:
    every = [*of_cases(), *of_layers(), *of_blocks(full)]
    return [setting for setting in every if re.search(pattern, setting.name)]


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def record(folder: pathlib.Path, chosen: list[Setting]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.json"
    kept = json.loads(index.read_text()) if index.exists() else {}
    for setting in chosen:
        arrays = setting.run()
        kept[setting.name] = {
            k: dict(dtype=x.dtype.name, shape=x.shape, digest=digest(x)) for k, x in arrays.items()
        }
        np.savez(file_of(folder, setting.name), **{k: as_bytes(x) for k, x in arrays.items()})
    index.write_text(json.dumps(kept, indent=1))
    print(f"{len(chosen)} settings recorded in {folder}, of jax {jax.__version__}")
    return 0


def file_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"


def as_bytes(x: np.ndarray) -> np.ndarray:
    """NumPy's files know no bfloat16."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def compare(folder: pathlib.Path, chosen: list[Setting]) -> int:
    index = json.loads((folder / "index.json").read_text())
    rows = []
    for setting in chosen:
        if setting.name not in index:
            rows.append((setting.name, "", "was not recorded"))
            continue
        before, now = index[setting.name], setting.run()
        arrays = np.load(file_of(folder, setting.name))
        for name in before | now:
            if problem := difference(before.get(name), arrays, name, now.get(name)):
                rows.append((setting.name, name, problem))
    for row in rows:
        print(" | ".join(row))
    differ = len({name for name, *_ in rows})
    print(
        f"{len(chosen)} settings, of which {differ} differ"
        if rows
        else f"{len(chosen)} settings, all bits equal"
    )
    return bool(rows)


def difference(before, arrays, name: str, now) -> str | None:
    if before is None or now is None:
        return "is new" if before is None else "is gone"
    kind = f"{before['dtype']}{before['shape']}"
    if kind != f"{now.dtype.name}{list(now.shape)}":
        return f"{kind} became {now.dtype.name}{list(now.shape)}"
    if before["digest"] == digest(now):
        return None
    old = arrays[name].tobytes()
    old = np.frombuffer(old, jnp.dtype(before["dtype"])).reshape(before["shape"])
    old, new = (x.astype(np.float64) for x in (old, now))
    gaps = np.abs(old - new)
    count = int((gaps != 0).sum() + np.isnan(gaps).sum())
    return f"differs by {np.nanmax(gaps) / (np.nanmax(np.abs(old)) or 1):.1e}, {count} of {gaps.size} numbers"


def main() -> int:
    use_virtual_devices()
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache/jax"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "runs/golden")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    chosen = settings(args.only, args.full)
    return (record if args.what == "record" else compare)(args.folder, chosen)


if __name__ == "__main__":
    sys.exit(main())

"""One exchange on a mesh, as data: what to run, on what operands, and what the oracle says of the results."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep.exchange_oracle import Exchange, axes_of, routing, shards
from expertmesh.core.mesh import global_shard_guard
from expertmesh.ep import (
    EpConfig,
    combine,
    dispatch,
    dispatch_weights,
    prepare,
    recv_capacity,
)

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, where the leading dimensions of tokens are on it, and the EP axes."""

    mesh: tuple = (("ep", 8),)
    spec: tuple = ("ep",)
    ep: tuple = ("ep",)
    sizes: tuple = (40,)
    E: int = 8
    K: int = 3
    A: int = 1
    C: int | None = None
    D: int = 6
    features: str | None = None
    transport: str = "ring"

    @property
    def R(self):
        return int(np.prod([dict(self.mesh)[a] for a in self.ep], dtype=int))

    @property
    def config(self):
        axis = self.ep[0] if len(self.ep) == 1 else self.ep
        return EpConfig(
            num_experts=self.E,
            capacity=self.C,
            alignment=self.A,
            transport=self.transport,
            axis=axis,
        )

    def oracle(self, topk):
        blocks = list(shards(dict(self.mesh), self.spec, self.sizes, self.ep))
        tokens = len(blocks[0])
        C = self.C or (recv_capacity(self.E, self.K, tokens, self.R, self.A) if tokens else 0)
        return Exchange(topk.reshape(-1, self.K), blocks, self.R, self.E, C, self.A)

    def specs(self):
        named = [a for entry in self.spec for a in axes_of(entry)]
        each = PartitionSpec(tuple(a for a in named if a not in self.ep) + self.ep)
        leading, rows = PartitionSpec(*self.spec), PartitionSpec(*each, None, self.features)
        tokens = PartitionSpec(*self.spec, self.features)
        operands = (leading, tokens, leading, rows, tokens, rows, each)
        results = dict(
            slot=leading,
            source=each,
            row=each,
            tokens_per_expert=each,
            group_sizes=each,
            total_recv=each,
            num_dropped=each,
            stranger=each,
            rows=rows,
            out=tokens,
            row_weights=each,
            d_tokens=tokens,
            d_rows=rows,
            d_weights=leading,
        )
        return operands, results


def operands_of(case, oracle, topk, dtype, seed=3):
    """Random operands; what is not a row is NaN in every buffer that a caller may leave undefined."""
    rng = np.random.default_rng(seed)
    tokens, rows = (*case.sizes, case.D), (oracle.P, oracle.C, case.D)

    def draw(shape):
        exponent = rng.integers(-9, 9, (*shape[:-1], 1))
        return np.array(jnp.asarray(rng.normal(size=shape) * 2.0**exponent, dtype))

    live = oracle.source() >= 0
    y, g_rows, g_weights = draw(rows), draw(rows), rng.normal(size=rows[:2]).astype(np.float32)
    y[~live], g_rows[~live], g_weights[~live] = np.nan, np.nan, np.nan
    weights = rng.normal(size=(*case.sizes, case.K)).astype(np.float32)
    return topk, draw(tokens), weights, y, draw(tokens), g_rows, g_weights


def exchange(topk, tokens, weights, y, g_tokens, g_rows, g_weights, *, config):
    """Everything public, with its cotangents."""
    handle = prepare(topk, config)
    rows, pull_tokens = jax.vjp(partial(dispatch, handle), tokens)
    out, pull_rows = jax.vjp(partial(combine, handle), y)
    row_weights, pull_weights = jax.vjp(partial(dispatch_weights, handle), weights)
    arrays = {name: getattr(handle, name) for name in INTEGERS}
    return arrays | dict(
        rows=rows,
        out=out,
        row_weights=row_weights,
        d_tokens=pull_tokens(g_rows)[0],
        d_rows=pull_rows(g_tokens)[0],
        d_weights=pull_weights(g_weights)[0],
    )


INTEGERS = (
    "slot",
    "source",
    "row",
    "tokens_per_expert",
    "group_sizes",
    "total_recv",
    "num_dropped",
    "stranger",
)


def check(out, case, oracle, operands):
    _, tokens, weights, y, g_tokens, g_rows, g_weights = (
        np.asarray(x, np.float64) for x in operands
    )
    tokens, g_tokens = tokens.reshape(-1, case.D), g_tokens.reshape(-1, case.D)
    integers = dict(
        slot=oracle.slot().reshape(*case.sizes, case.K),
        source=oracle.source(),
        row=oracle.row(),
        tokens_per_expert=oracle.raw,
        group_sizes=oracle.sizes,
        total_recv=oracle.total,
        num_dropped=oracle.dropped,
        stranger=[-1] * oracle.P,
    )
    for name, want in integers.items():
        assert out[name].dtype == jnp.int32, name
        np.testing.assert_array_equal(out[name], want, err_msg=name)
    dtype = operands[1].dtype
    exact = dict(
        rows=(oracle.dispatch(tokens), dtype),
        d_rows=(oracle.dispatch(g_tokens), dtype),
        row_weights=(oracle.dispatch_weights(weights.reshape(-1, case.K)), jnp.float32),
        d_weights=(
            oracle.combine_weights(g_weights).reshape(*case.sizes, case.K),
            jnp.float32,
        ),
    )
    for name, (want, kind) in exact.items():
        assert out[name].dtype == kind, name
        np.testing.assert_array_equal(np.asarray(out[name], np.float64), want, err_msg=name)
    sums = dict(out=(oracle.combine(y), oracle.combine(abs(y))))
    sums["d_tokens"] = (oracle.combine(g_rows), oracle.combine(abs(g_rows)))
    for name, (want, scale) in sums.items():
        assert out[name].dtype == dtype, name
        error = np.asarray(out[name], np.float64).reshape(want.shape) - want
        # One bound per token, on the terms of its sum: tokens differ by 2 ** 18, and terms may cancel.
        bound = TOLERANCE[str(dtype)] * np.linalg.norm(scale, axis=-1)
        assert np.all(np.linalg.norm(error, axis=-1) <= bound), name


def compiled_run(case, mode, resource=None):
    """One jitted exchange on the case's mesh."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    names, sizes = zip(*case.mesh, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    operand_specs, result_specs = case.specs()
    function = partial(exchange, config=case.config)
    if mode.startswith("manual"):
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=operand_specs,
            out_specs=result_specs,
            check_vma=mode == "manual",
        )
    function = jax.jit(function)

    def place(operands):
        return [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(operands, operand_specs, strict=True)
        ]

    def run(operands):
        with global_shard_guard(resource):
            return function(*place(operands))

    return run, result_specs


def run_case(case, mode="manual", dtype="float32", kinds=("holes",), resource=None):
    run, result_specs = compiled_run(case, mode, resource)
    for kind in kinds:
        topk = routing(kind, int(np.prod(case.sizes)), case.K, case.E).reshape(*case.sizes, case.K)
        oracle = case.oracle(topk)
        operands = operands_of(case, oracle, topk, dtype)
        out = run(operands)
        check(out, case, oracle, operands)
    return out, result_specs

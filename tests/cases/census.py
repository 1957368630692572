"""What the census of collectives is of: ops and layers, layouts of their operands, mesh modes.

Sizes are distinct primes times what shards and blocks divide, so that a number of bytes says which array it is. Nothing
runs: programs are compiled for types only, and sizes cost nothing.

Dimension key: B, S tokens, K contraction, N output, P participants, C rows, E experts, G groups per participant,
D model width, F expert width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cases import core, ep
from expertmesh.core import (
    RECIPES,
    Activation,
    DelayedScaling,
    MeshResource,
    NVFP4BlockScaling,
    accumulate_gradient,
    activate,
    dense,
    gather_weight,
    gathered_gemm,
    gemm,
    grouped_dense,
    grouped_gemm,
    grouped_quantize,
    init_dense_state,
    move_values,
    plan_permute,
    quantize,
    quantize_dbias,
    quantize_weight,
)
from expertmesh.core.quantization.activate_quantize import activate_grad_quantize, activate_quantize
from expertmesh.core.testing import OpCase
from expertmesh.flax_moe import (
    MoEConfig,
    init_quant_state,
    moe,
    param_shapes,
    param_specs,
    quantize_weights,
)

MODES = ("explicit", "resource", "auto", "manual")
PASSES = ("forward", "gradients")

B, S, K, N = 8 * 7, 2 * 128 * 11, 4 * 128 * 3, 4 * 128 * 5
C, E, TOP_K = 128 * 17, 4 * 13, 3
T, DP = ("fsdp", "ep"), ("dp", "fsdp", "ep")  # the axes of the tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the operands of a call are.

    Attributes:
      specs: of each operand, in trees like theirs.
      results: of each result, where it is wanted; None: that is not said.
      axes: sizes of the mesh.
      resource: in context in the modes "resource" and "manual", and if `roles` in "explicit".
      given: options that say where arrays are, in the mode "resource", and if `roles` in "explicit".
      roles: types cannot say all, such as that a sum is to be scattered into a result.
      modes: in which it can be.
    """

    specs: tuple
    results: tuple | None
    axes: Mapping[str, int]
    resource: MeshResource
    given: Mapping[str, object] = dataclasses.field(default_factory=dict)
    roles: bool = False
    modes: tuple[str, ...] = MODES[:3]


def on_mesh(*specs, results=None, third="tp", **more) -> Layout:
    """Over fsdp, ep and a third axis, of two devices each; the third has the role of its name."""
    axes = {"fsdp": 2, "ep": 2}
    return Layout(
        specs=specs,
        results=results,
        axes={third: 2, **axes} if third == "dp" else {**axes, third: 2},
        resource=MeshResource(
            fsdp_resource="fsdp", ep_resource="ep", **{f"{third}_resource": third}
        ),
        **more,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An op or a layer.

    Attributes:
      name: unique.
      function: `function(*operands, **given)`, a tree of results.
      operands: `operands(layout)`, trees of types.
      layouts: name -> Layout.
      wrt: operands with gradients.
      always: the layouts that `make test` compiles under a resource; None: one, and another row, in turn.
    """

    name: str
    function: Callable
    operands: Callable[[Layout], tuple]
    layouts: Mapping[str, Layout]
    wrt: tuple[int, ...] = ()
    always: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One program."""

    subject: Subject
    layout: str
    direction: str
    mode: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.subject.name, self.layout, self.direction, self.mode

    @property
    def where(self) -> Layout:
        return self.subject.layouts[self.layout]


def rows_of(subject: Subject) -> list[Row]:
    passes = PASSES if subject.wrt else PASSES[:1]
    return [
        Row(subject, name, direction, mode)
        for name, layout in subject.layouts.items()
        for direction in passes
        for mode in layout.modes
    ]


def all_rows() -> list[Row]:
    return [row for subject in subjects() for row in rows_of(subject)]


def covering_rows() -> list[Row]:
    """What `make test` compiles: of each subject a layout or some under a resource, and other modes and passes."""
    chosen = []
    for turn, subject in enumerate(subjects()):
        every, names = rows_of(subject), list(subject.layouts)
        for name in [names[turn % len(names)]] if subject.always is None else subject.always:
            same = [row for row in every if row.layout == name]
            chosen.append(([row for row in same if row.mode == "resource"] or same)[-1])
        rest = [row for row in every if row not in chosen]
        if rest and subject.always is None:
            chosen.append(rest[turn % len(rest)])
    return chosen


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def types(*of) -> Callable:
    """`operands` that are alike in each layout, of (dtype, *shape) each."""
    return lambda layout: tuple(struct(*one) for one in of)


# ---- GEMMs and layers


def dense_layouts() -> dict[str, Layout]:
    """Of x [B, S, K], w [K, N], bias [N]; y [B, S, N]."""

    def one(x, w, bias, y, third="tp", told=True, **more):
        given = dict(x_spec=x, w_spec=w, out_spec=y) if told else {}
        return on_mesh(x, w, bias, results=(y,), third=third, given=given, **more)

    split = P(T, None, "tp")
    return {
        "data parallel": one(P(T), P(), P(), P(T), modes=MODES),
        "dp, fsdp on K": one(P(DP), P("fsdp"), P(), P(DP), "dp", told=False),
        "fsdp on N": one(P(T), P(None, "fsdp"), P(), P(T)),
        "fsdp and ep on K": one(P(T), P(T), P(), P(T)),
        "fsdp and ep on N": one(P(T), P(None, T), P(), P(T)),
        "ep on K, fsdp on N": one(P(T), P("ep", "fsdp"), P(), P(T)),
        "sequence over cp": one(P(T, "cp"), P("fsdp"), P(), P(T, "cp"), "cp", told=False),
        "tp columns": one(P(T), P("fsdp", "tp"), P("tp"), split),
        "tp rows": one(split, P("tp", "fsdp"), P(), P(T)),
        "tp columns, sequence over tp": one(P(T, "tp"), P(None, "tp"), P("tp"), split, roles=True),
        "tp rows, sequence over tp": one(split, P("tp"), P(), P(T, "tp"), roles=True),
    }


dense_types = types(("bfloat16", B, S, K), ("float32", K, N), ("float32", N))


# recipe -> the layouts of its layers that `make test` compiles
OF_RECIPES = {
    "fp8_current": ("tp rows",),
    "fp8_delayed": ("tp columns",),
    "fp8_block": ("tp columns",),
    "mxfp8": ("tp columns", "tp rows"),
    "nvfp4": ("tp rows",),
}


def of_recipes(layouts):
    """The layouts that all recipes have; one has each."""
    return {k: v for k, v in layouts.items() if "fsdp on" in k or k in ("tp columns", "tp rows")}


def _dense(x, w, bias, *, recipe, **given):
    state = init_dense_state(recipe) if isinstance(recipe, DelayedScaling) else None
    return dense(x, w, bias, recipe=recipe, state=state, key=_key(), **given)


def _grouped_dense(x, w, sizes, bias, *, recipe, **given):
    delayed = isinstance(recipe, DelayedScaling)
    state = init_dense_state(recipe, num_experts=w.shape[0]) if delayed else None
    return grouped_dense(x, w, sizes, bias, recipe=recipe, state=state, key=_key(), **given)


def _key():
    return jnp.zeros(2, jnp.uint32)


def _of_copies(layer, batch_dims):
    """The layer, its weight quantized before."""

    def function(x, w, *rest, w_spec=None, **given):
        q = quantize_weight(w, "mxfp8", batch_dims=batch_dims, spec=w_spec)
        return layer(x, w, *rest, recipe="mxfp8", weight_quantized=q, w_spec=w_spec, **given)

    return function


def _dense_of_two(x, w, bias, **given):
    return dense(x, w, bias, contracting_dims=((2, 3), (0, 1)), recipe="mxfp8", **given)


def _accumulated(x, w, bias, total, **given):
    return gemm(x, accumulate_gradient(w, total), bias, **given)


def dense_subjects() -> Iterator[Subject]:
    layouts = dense_layouts()
    common = dict(operands=dense_types, layouts=layouts, wrt=(0, 1, 2))
    yield Subject(name="gemm", function=gemm, always=tuple(layouts), **common)
    for name, always in OF_RECIPES.items():
        layer = functools.partial(_dense, recipe=RECIPES[name]())
        common |= dict(layouts=layouts if name == "mxfp8" else of_recipes(layouts))
        yield Subject(name=f"dense {name}", function=layer, always=always, **common)
    tp = {name: layout for name, layout in layouts.items() if name in ("tp columns", "tp rows")}
    common |= dict(layouts=tp)
    yield Subject(name="dense of a QuantizedWeight", function=_of_copies(dense, 0), **common)
    yield Subject(
        name="gemm after accumulate_gradient",
        function=_accumulated,
        operands=lambda layout: (*dense_types(layout), struct("float32", K, N)),
        layouts={
            name: dataclasses.replace(layout, specs=(*layout.specs, layout.specs[1]))
            for name, layout in layouts.items()
            if "on " in name
        },
        wrt=(0, 1, 2),
    )
    x, w = P(T, None, "tp"), P("tp", None, "fsdp")
    yield Subject(
        name="dense of two contracted dimensions",
        function=_dense_of_two,
        operands=types(("bfloat16", B, S, 4, K // 4), ("float32", 4, K // 4, N), ("float32", N)),
        layouts={
            "tp rows": on_mesh(
                *(x, w, P()), results=(P(T),), given=dict(x_spec=x, w_spec=w, out_spec=P(T))
            ),
            "fsdp on K": on_mesh(P(T), P("fsdp"), P(), results=(P(T),)),
        },
        wrt=(0, 1, 2),
        always=("tp rows", "fsdp on K"),
    )


def grouped_layouts(names=("x_spec", "w_spec", "out_spec")) -> dict[str, Layout]:
    """Of x [P, C, K], w [E, K, N], group_sizes [P, G], bias [E, N]; y [P, C, N]."""

    def one(x, w, bias, y, third="tp", told=True, **more):
        given = dict(zip(names, (x, w, y), strict=True)) if told else {}
        sizes = P(*x[:1])
        return on_mesh(x, w, sizes, bias, results=(y,), third=third, given=given, **more)

    split, on_ep = P(T, None, "tp"), P("ep")
    return {
        "data parallel": one(P(T), P(), P(), P(T)),
        "ep": one(P(T), on_ep, on_ep, P(T)),
        "ep, fsdp on K": one(P(T), P("ep", "fsdp"), on_ep, P(T), told=False),
        "dp, ep, fsdp on K": one(P(DP), P("ep", "fsdp"), on_ep, P(DP), "dp", told=False),
        "ep, fsdp on N": one(P(T), P("ep", None, "fsdp"), on_ep, P(T)),
        "ep and fsdp on E": one(P(T), P(("ep", "fsdp")), on_ep, P(T)),
        "tp columns": one(P(T), P("ep", "fsdp", "tp"), P("ep", "tp"), split),
        "tp rows": one(split, P("ep", "tp", "fsdp"), on_ep, P(T)),
        "tp rows to columns": one(split, P("ep", "tp"), P("ep", "tp"), split, roles=True),
    }


def grouped_types(layout):
    """A participant for each shard of the tokens; if the weights are split over ep, two sets of them."""
    participants = math.prod(layout.axes[axis] for axis in layout.specs[0][0])
    groups = E // 2 if layout.specs[1] else E
    return (
        struct("bfloat16", participants, C, K),
        struct("float32", E, K, N),
        struct("int32", participants, groups),
        struct("float32", E, N),
    )


def _gathered_gemm(x, w, idx, **given):
    return gathered_gemm(x, w, plan_permute(idx, num_experts=w.shape[0]), **given)


def grouped_subjects() -> Iterator[Subject]:
    common = dict(operands=grouped_types, wrt=(0, 1, 3))
    layouts = grouped_layouts(("x_spec", "w_spec", "out_spec"))
    yield Subject(
        name="grouped_gemm",
        function=grouped_gemm,
        layouts=layouts,
        always=tuple(layouts),
        **common,
    )
    layouts = grouped_layouts()
    for name, always in OF_RECIPES.items():
        yield Subject(
            name=f"grouped_dense {name}",
            function=functools.partial(_grouped_dense, recipe=RECIPES[name]()),
            layouts=layouts if name == "fp8_block" else of_recipes(layouts),
            always=always,
            **common,
        )
    yield Subject(
        name="grouped_dense of a QuantizedWeight",
        function=_of_copies(grouped_dense, 1),
        layouts={name: layouts[name] for name in ("tp columns", "tp rows")},
        **common,
    )
    split = P(None, "fsdp", "tp")
    yield Subject(
        name="gathered_gemm",
        function=_gathered_gemm,
        operands=types(("bfloat16", 4, S, K), ("float32", E, K, N), ("int32", 4, S, TOP_K)),
        layouts={
            "data parallel": on_mesh(P(T), P(), P(T), results=(P(T),), given=dict(w_spec=P())),
            "tp columns": on_mesh(
                *(P(T), split, P(T)), results=(P(T, None, "tp"),), given=dict(w_spec=split)
            ),
        },
        wrt=(0, 1),
    )
    yield Subject(
        name="gather_weight",
        function=lambda x, w: x @ gather_weight(w, P("fsdp"), dtype="bfloat16"),
        operands=types(("bfloat16", B, S, K), ("float32", K, N)),
        layouts={"fsdp on K": on_mesh(P(T), P("fsdp"), results=(P(T),), modes=MODES[-1:])},
        wrt=(0, 1),
    )


# ---- quantization and activations


def quantizers() -> Iterator[Subject]:
    """Each array is quantized where it is: only amaxes cross devices."""
    kernels = {
        "fsdp on K": P("fsdp"),
        "fsdp on N": P(None, "fsdp"),
        "tp columns": P("fsdp", "tp"),
        "tp rows": P("tp", "fsdp"),
    }
    for name, recipe in RECIPES.items():
        for lead in () if issubclass(recipe, DelayedScaling) else ((), ("ep",)):
            specs = {layout: P(*lead, *spec) for layout, spec in kernels.items()}
            yield Subject(
                name=f"quantize_weight {name}{' of experts' * len(lead)}",
                function=functools.partial(quantize_weight, recipe=recipe(), batch_dims=len(lead)),
                operands=types(("float32", *(E,) * len(lead), K, N)),
                layouts={
                    # Without a given spec, it is that of the roles.
                    layout: on_mesh(spec, given={} if layout == "fsdp on K" else dict(spec=spec))
                    for layout, spec in specs.items()
                },
                always=tuple(specs) if name == "mxfp8" else None,
            )
    specs = {"tp": P(T, None, "tp"), "tokens": P(T)}
    for name, along in (("mxfp8", -1), ("mxfp8", 1), ("fp8_current", -1), ("nvfp4", -1)):
        format = RECIPES[name]().formats().x
        layouts = {layout: on_mesh(spec, given=dict(spec=spec)) for layout, spec in specs.items()}
        words = f"{name} along {'the rows' if along == 1 else 'the last'}"
        yield Subject(
            name=f"quantize {words}",
            function=functools.partial(quantize, format=format, axis=along),
            operands=types(("bfloat16", B, S, K)),
            layouts=layouts,
        )
        rows = P(T, "tp")  # gathered; where a resource names the axis, without a warning
        gathered = {"rows over tp": on_mesh(rows, given=dict(spec=rows), modes=("resource",))}
        yield Subject(
            name=f"grouped_quantize {words}",
            function=functools.partial(grouped_quantize, format=format, axis=along),
            operands=types(("bfloat16", 4, C, K), ("int32", 4, E)),
            layouts={
                name: dataclasses.replace(layout, specs=(*layout.specs, P(T)))
                for name, layout in (layouts | gathered).items()
            },
            always=("tp", *gathered) if name == "fp8_current" else ("tp",),
        )
    yield Subject(
        name="quantize_dbias fp8_block",
        function=functools.partial(quantize_dbias, format=RECIPES["fp8_block"]().formats().x),
        operands=types(("bfloat16", B, S, K)),
        layouts={layout: on_mesh(spec, given=dict(spec=spec)) for layout, spec in specs.items()},
    )


def activations() -> Iterator[Subject]:
    """Of h [P, C, 2, F], or [P, C, F] without a gate; F over the tensor axis."""
    for name, activation, pair in (
        ("gated", "silu", (2,)),
        ("plain", Activation(function="gelu", gated=False), ()),
    ):
        yield Subject(
            name=f"activate {name}",
            function=functools.partial(activate, activation=activation),
            operands=types(("bfloat16", 4, C, *pair, N)),
            layouts={
                f"F over {axis}": on_mesh(
                    P(T, None, *(None,) * len(pair), axis),
                    results=(P(T, None, axis),),
                    third=axis,
                    modes=MODES if axis == "tp" else MODES[:2],
                )
                for axis in ("tp", "tpsp")
            },
            wrt=(0,),
            always=("F over tp", "F over tpsp"),
        )


def fused() -> Iterator[Subject]:
    """An activation of h [P, C, 2, F] and its gradient, quantized; F by a role, and by a given spec alone."""
    for name in ("fp8_current", "fp8_block"):
        format = RECIPES[name]().formats().x
        options = dict(formats=(format, format), activation="silu")
        common = dict(always=("F over cp",))
        h, d = (("bfloat16", 4, C, *pair, N) for pair in ((2,), ()))
        of_h, of_d = ({third: P(T, *(None,) * n, third) for third in ("tp", "cp")} for n in (2, 1))
        yield Subject(
            name=f"activate_quantize {name}",
            function=functools.partial(activate_quantize, **options),
            operands=types(h, ("int32", 4, E)),
            layouts={
                f"F over {third}": on_mesh(
                    *(of_h[third], P(T)), third=third, given=dict(spec=of_d[third])
                )
                for third in ("tp", "cp")
            },
            **common,
        )
        yield Subject(
            name=f"activate_grad_quantize {name}",
            function=functools.partial(activate_grad_quantize, **options),
            operands=types(h, d, ("int32", 4, E)),
            layouts={
                f"F over {third}": on_mesh(
                    *(of_h[third], of_d[third], P(T)), third=third, given=dict(spec=of_h[third])
                )
                for third in ("tp", "cp")
            },
            **common,
        )


# ---- the cases of the contract


def of_case(case: OpCase) -> Subject:
    """An OpCase over (a, b); sizes that no layout shards are primes."""
    resource = MeshResource(fsdp_resource="a", ep_resource="b")
    arrays = case.operands(np.random.default_rng(0), "odd", "bfloat16")
    arrays = tuple(struct(x.dtype, *x.shape) for x in map(np.asarray, arrays))

    def layout(name, specs):
        kept = case.independent.get(name)
        by_role = ("resource",) if name == "tuple" else ()  # where the roles say
        return Layout(
            specs=specs,
            results=kept,
            axes={"a": 2, "b": 4},
            resource=resource,
            roles=case.exchanges,
            modes=("explicit", *by_role, "auto", *(("manual",) if kept else ())),
        )

    return Subject(
        name=case.name,
        function=case.function,
        operands=lambda _: arrays,
        layouts={name: layout(name, specs) for name, specs in case.layouts.items()},
        wrt=case.wrt,
        always=("tuple",),
    )


def cases_of_the_contract() -> list[OpCase]:
    """Those that have no layouts of their own here."""
    others = ("gemm", "dense", "grouped_", "quantize")
    return [case for case in (*core.CASES, *ep.CASES) if not case.name.startswith(others)]


def choices() -> Iterator[Subject]:
    """Values of choices to rows and back; x and the plan over the tokens."""
    layouts = {"data parallel": on_mesh(P(T), P(T), results=(P(T),))}
    for way, shape in (("to rows", (4, S, TOP_K)), ("to choices", (4, S * TOP_K))):

        def moved(values, idx, way=way):
            plan = plan_permute(idx, num_experts=E)
            return move_values(values, plan if way == "to rows" else plan.inverse)

        yield Subject(
            name=f"move_values {way}",
            function=moved,
            operands=types(("float32", *shape), ("int32", 4, S, TOP_K)),
            layouts=layouts,
            wrt=(0,),
        )


# ---- the block

D, F = K, N
# name -> options of MoEConfig
BLOCKS: Mapping[str, Mapping] = {
    "": {},
    "all_to_all": dict(transport="all_to_all"),
    "biases": dict(use_bias=True),
    "no gate": dict(activation=Activation(function="gelu", gated=False)),
    "losses": dict(aux_loss_coeff=0.5, z_loss_coeff=0.5),
    "sequence loss": dict(aux_loss_coeff=0.5, aux_loss_per_sequence=True),
    "groups of experts": dict(score_function="sigmoid", num_groups=4, group_topk=3),
    "capacity": dict(capacity_factor=1.25),
    "overflow": dict(capacity_factor=1.25, overflow="error"),
    "chunks": dict(num_chunks=7),
    "recompute": dict(remat="recompute"),
    "bfloat16 gradients": dict(reduce_dtype="bfloat16"),
    "fsdp on E": dict(shard_exp_on_fsdp=True),
    "shared": dict(shared_expert_dim=N),
    "shared, gated": dict(shared_expert_dim=N, shared_expert_gate=True),
    "latent": dict(latent_dim=4 * 7 * 31),
    "null experts": dict(num_null_experts=E, null_experts="identity"),
    "separate wi": dict(separate_wi=True),
    "shared mxfp8": dict(shared_expert_dim=N, recipe="mxfp8"),
    **{name: dict(recipe=name) for name in RECIPES},
    "nvfp4, nearest": dict(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True)),
    "fp8_current and biases": dict(recipe="fp8_current", use_bias=True),
    "fp8_block and biases": dict(recipe="fp8_block", use_bias=True),
    "fp8_block, no gate": dict(
        recipe="fp8_block", activation=Activation(function="gelu", gated=False)
    ),
    "mxfp8 by all_to_all": dict(recipe="mxfp8", transport="all_to_all"),
    "fp8_block, gradients of tokens too": dict(
        recipe="fp8_block", transport="all_to_all", quantize_backward_combine=True
    ),
    "gate bias, unbiased counts": dict(
        use_gate_bias=True, aux_loss_coeff=0.5, aux_loss_counts="unbiased"
    ),
    "fp8_block, fsdp on E": dict(recipe="fp8_block", shard_exp_on_fsdp=True),
}


ALWAYS = {
    "": ("tp", "sequence over cp"),
    **dict.fromkeys(("no gate", "fp8_block", "fp8_current and biases"), ("tp",)),
}


def _block(params, x, mask, *, config, copies=False):
    state = init_quant_state(config)
    if copies:
        copies = quantize_weights(params, config)
    out = moe(
        params,
        x,
        config,
        token_mask=mask,
        quant_state=state,
        weights_quantized=copies or None,
        key=_key() if config.recipe is not None else None,
    )
    return out.y, out.aux_loss, out.z_loss, out.entropy, out.tokens_per_expert


def block_subject(name, options, layouts, masked=False, copies=False) -> Subject:
    config = MoEConfig(
        **dict(num_experts=E, top_k=TOP_K, expert_dim=F, transport="ring") | dict(options)
    )
    params = {k: struct("float32", *shape) for k, shape in param_shapes(D, config).items()}

    def layout(x, third, modes):
        mesh = on_mesh(third=third)
        specs = param_specs(config, mesh.resource)
        mask = (P(*x) if masked else None,)
        where = dict(third=third, results=(x, P(), P(), P(), P()), modes=modes)
        return on_mesh(specs, x, *mask, **where)

    mask = struct("bool", B, S) if masked else None
    return Subject(
        name=f"moe {name}".strip(),
        function=functools.partial(_block, config=config, copies=copies),
        operands=lambda _: (params, struct("bfloat16", B, S, D), mask),
        layouts={name: layout(*where) for name, where in layouts.items()},
        wrt=(0, 1),
        always=ALWAYS.get(name, ()),
    )


def blocks() -> Iterator[Subject]:
    tp = {"tp": (P(T), "tp", ("resource",))}
    every = {
        "tp": (P(T), "tp", MODES[:3]),
        "dp": (P(DP), "dp", MODES[:2]),
        "sequence over cp": (P(T, "cp"), "cp", MODES[:2]),
        "sequence over tp": (P(T, "tp"), "tp", MODES[:2]),
    }
    for name, options in BLOCKS.items():
        yield block_subject(name, options, tp if options else every)
    yield block_subject("masked", dict(aux_loss_coeff=0.5, z_loss_coeff=0.5), tp, masked=True)
    yield block_subject("of QuantizedWeights", dict(recipe="mxfp8"), tp, copies=True)


@functools.cache
def subjects() -> tuple[Subject, ...]:
    """All, in the order of the table."""
    return (
        *dense_subjects(),
        *grouped_subjects(),
        *quantizers(),
        *activations(),
        *fused(),
        *choices(),
        *map(of_case, cases_of_the_contract()),
        *blocks(),
    )

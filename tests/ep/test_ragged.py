"""The ragged transport: XLA:CPU lacks its collective, so a stand-in does what JAX documents of it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.covering import covering
from ep.exchange_case import Case, run_case
from ep.exchange_oracle import routing
from ep.ragged_stand_in import ragged_all_to_all
from expertmesh.core.mesh import MeshResource
from expertmesh.ep import EpConfig, combine, dispatch, is_supported, prepare, transports
from expertmesh.ep.transports import BY_NAME, ragged
from expertmesh.ep.transports.choice import Exchange, choose


@pytest.fixture
def on_cuda(monkeypatch):
    """The ragged transport runs, as if these devices were GPUs."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(transports, "platform_of", lambda *operands: "cuda")


DP_EP = (("dp", 2), ("ep", 4))
CASES = {
    "ep": (Case(), "manual"),
    "little room": (Case(C=7, E=16), "explicit"),
    "one choice": (Case(K=1, C=4, A=4, mesh=DP_EP, spec=(("dp", "ep"),)), "explicit"),
    "sequence": (
        Case(mesh=DP_EP, spec=("dp", "ep"), sizes=(2, 12), A=4, D=8),
        "manual",
    ),
    "tuple": (
        Case(
            mesh=(("dp", 2), ("ep", 2), ("tp", 2)), spec=(("tp", "dp", "ep"),), ep=("tp", "ep"), A=8
        ),
        "auto",
    ),
}
RESOURCE = MeshResource(dp_resource="dp", ep_resource=("tp", "ep"))


@covering("name", CASES, covers=["little room"])
def test_equals_the_oracle(name, on_cuda):
    case, mode = CASES[name]
    if mode == "auto":  # tokens go by roles, ranks by the EP axes
        case = dataclasses.replace(case, spec=(("dp", "tp", "ep"),))
    run_case(
        dataclasses.replace(case, transport="ragged"),
        mode,
        "bfloat16" if name == "little room" else "float32",
        kinds=("uniform", "one", "none", "holes"),
        resource=RESOURCE if mode == "auto" else None,
    )


def test_only_filled_rows_are_sent(on_cuda, monkeypatch):
    """A token goes to a rank once, however many of its experts are there."""
    sent = {}

    def spy(operand, output, *params, axis_name):
        jax.debug.callback(
            lambda rank, sizes: sent.__setitem__(int(rank), sizes.tolist()),
            jax.lax.axis_index(axis_name),
            params[1],
        )
        return ragged_all_to_all(operand, output, *params, axis_name=axis_name)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", spy)
    topk = np.full((8, 2), -1, np.int32)
    topk[0] = 0, 1  # rank 0 of 4, with 2 tokens: both experts of rank 0
    topk[1] = 2, 7  # ranks 1 and 3
    topk[6] = 6, 6  # rank 3 to itself
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        place = partial(jax.sharding.reshard, out_shardings=jax.P("ep"))
        config = EpConfig(num_experts=8, axis="ep", transport="ragged")
        handle = prepare(place(jnp.asarray(topk)), config)
        rows = jax.block_until_ready(dispatch(handle, place(jnp.ones((8, 3)))))
        jax.effects_barrier()
        assert sent == {0: [1, 1, 0, 1], 1: [0] * 4, 2: [0] * 4, 3: [0, 0, 0, 1]}
        jax.block_until_ready(combine(handle, rows))
        jax.effects_barrier()
    assert sent == {0: [1, 0, 0, 0], 1: [1, 0, 0, 0], 2: [0] * 4, 3: [1, 0, 0, 1]}


def test_cpu_says_so_when_traced():
    case = Case(sizes=(48,), D=5, transport="ragged")
    mesh = jax.make_mesh((8,), ("ep",))
    with jax.set_mesh(mesh):
        place = partial(jax.sharding.reshard, out_shardings=jax.P("ep"))
        handle = prepare(place(jnp.asarray(routing("uniform", 48, 3, 8))), case.config)
        for function, x in [
            (dispatch, jnp.ones((48, 5))),
            (combine, jnp.ones((*handle.source.shape, 5))),
        ]:
            with pytest.raises(ValueError) as error:
                jax.jit(function).lower(handle, place(x))
            for words in ("'ragged'", "ep_size=8", "XLA:CPU", "transport='auto'"):
                assert words in str(error.value)


def test_one_rank_needs_no_collective():
    topk, x = jnp.asarray([[0, 2], [1, 1]], jnp.int32), jnp.asarray([[1.0], [10.0]])
    handle = prepare(topk, EpConfig(num_experts=3, transport="ragged"))
    np.testing.assert_array_equal(dispatch(handle, x)[0, :, 0], [1, 10, 10, 1])
    np.testing.assert_array_equal(combine(handle, dispatch(handle, x)), 2 * x)


def test_auto_never_takes_it():
    sizes = (1, 3, 64)
    taken = {
        choose(
            Exchange(num_tokens=T, top_k=K, capacity=C, ep_size=R, dtype=dtype, platform="cuda"),
            linked=False,
        )
        for T in sizes
        for K in sizes
        for C in sizes
        for R in (1, 2, 64)
        for dtype in ("uint8", "bfloat16", "float32")
    }
    assert taken == {"local", "ring", "all_to_all"}


def test_is_supported():
    for feature in ("local", "ring", "all_to_all"):
        assert is_supported(feature) == (True, "")
    supported, reason = is_supported("ragged", jax.devices("cpu")[0])
    assert not supported and "XLA:CPU" in reason
    assert ragged.unsupported(Exchange(platform="cuda")) is None
    with pytest.raises(ValueError, match=f"{', '.join(BY_NAME)}; got feature='nccl'"):
        is_supported("nccl")


@pytest.mark.gpu
def test_on_gpus():
    """The real collective, over every GPU of this process."""
    num = len(jax.devices("cuda"))
    if num < 2:
        pytest.skip("needs 2 GPUs in one process")
    case = Case(mesh=(("ep", num),), sizes=(40 * num,), E=2 * num, A=4, transport="ragged")
    for dtype in ("float32", "bfloat16"):
        run_case(case, "explicit", dtype, kinds=("uniform", "skewed", "one", "none", "holes"))
    run_case(dataclasses.replace(case, C=48, D=512), "explicit", "bfloat16", kinds=("holes",))
    run_case(dataclasses.replace(case, K=1), "manual", kinds=("skewed",))

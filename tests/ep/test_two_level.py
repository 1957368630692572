"""Two levels: rows, sums, gradients and drops are those of loops over tokens, whatever goes between hosts and when."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cases.covering import covering, full
from ep.exchange_case import Case, compiled_run, operands_of, run_case
from ep.exchange_oracle import routing
from expertmesh.core import MeshResource, TensorFormat, grouped_quantize, quantize
from expertmesh.core.testing import magnitudes, relative_error
from expertmesh.ep import EpConfig, bootstrap, combine, dispatch, hosts, prepare
from expertmesh.ep.transports import two_level
from flax_moe.quantized_oracle import rounded

HOST_EP = (("host", 4), ("ep", 2))


@dataclasses.dataclass(frozen=True)
class Hosts(Case):
    """An EP group over hosts; `groups` are the router's (num_groups, group_topk)."""

    mesh: tuple = HOST_EP
    spec: tuple = (("host", "ep"),)
    ep: tuple = ("host", "ep")
    transport: str = "two_level:all_to_all"
    groups: tuple = (None, None)

    @property
    def config(self):
        num_groups, group_topk = self.groups
        return dataclasses.replace(super().config, num_groups=num_groups, group_topk=group_topk)


TRIPLE = (("host", 2), ("tp", 2), ("ep", 2))
CASES = {
    "blocks": (Hosts(), "manual"),
    "ring": (Hosts(A=8, transport="two_level:ring"), "explicit"),
    "little room": (Hosts(C=7, E=16), "explicit"),
    "one choice": (Hosts(K=1, C=4, A=4, transport="two_level"), "manual"),
    "one of four groups": (Hosts(groups=(4, 1)), "manual"),
    "one of two groups": (Hosts(groups=(2, 1), C=24, A=8, transport="two_level:ring"), "explicit"),
    "more choices than hosts": (Hosts(mesh=(("host", 2), ("ep", 4)), K=4), "explicit"),
    "an axis between": (Hosts(mesh=TRIPLE, A=4), "explicit"),
    "hosts last": (Hosts(mesh=TRIPLE[::-1], spec=(("ep", "host"),)), "manual unchecked"),
    "beside data": (Hosts(mesh=(("dp", 2), *TRIPLE[::2]), spec=(("dp", "host", "ep"),)), "manual"),
    "three axes": (
        Hosts(mesh=TRIPLE, spec=(("host", "tp", "ep"),), ep=("host", "tp", "ep")),
        "manual",
    ),
    "sequence": (Hosts(spec=("host", "ep"), sizes=(4, 12), transport="two_level"), "explicit"),
    "features": (Hosts(mesh=TRIPLE, features="tp"), "explicit"),
    "one host": (Hosts(mesh=(("host", 1), ("ep", 8))), "manual"),
    "hosts of one rank": (Hosts(mesh=(("host", 8), ("ep", 1)), transport="two_level"), "explicit"),
    "no tokens": (Hosts(sizes=(0,)), "explicit"),
    "roles": (Hosts(mesh=TRIPLE, K=4), "auto"),
}
ROLES = MeshResource(ep_resource=("host", "ep"))


@covering(
    "name",
    CASES,
    covers=["blocks", "little room", "one of two groups", "roles"],
)
def test_equals_the_oracle(name):
    case, mode = CASES[name]
    run_case(
        case,
        mode,
        "bfloat16" if name in ("ring", "little room") else "float32",
        kinds=("uniform", "skewed", "one", "none", "holes"),
        resource=ROLES if mode == "auto" else None,
    )


@pytest.mark.parametrize("mesh", [HOST_EP, (("host", 2), ("ep", 4))], ids=["4 x 2", "2 x 4"])
def test_rows_of_the_host(mesh):
    """host_row[p, g, k]: of a choice at the i-th rank of the host of p, i * C and its row; else -1."""
    case = Hosts(mesh=mesh, C=6, E=16)
    topk, ranks = routing("holes", 40, 3, 16), mesh[1][1]
    oracle = case.oracle(topk)
    want = np.full((8, 40, 3), -1)
    for p, n, t, k in oracle.live():
        first = p // ranks * ranks
        want[first : first + ranks, t, k] = (p - first) * 6 + n
    got = on_mesh(case, lambda handle: handle.host_row, topk)
    np.testing.assert_array_equal(got, want)
    assert set(np.unique(want)) >= {-1, 0, 6 * ranks - 1}


def level(num_tokens, H=4):
    """Each rank has as many tokens for each host: of two hosts for each token."""
    t = np.arange(num_tokens)[:, None]
    return ((t + [0, 1]) % H * 2 + t // H % 2).astype(np.int32)


def one_pair(num_tokens):
    """All tokens go to the last host and the one before it."""
    return np.broadcast_to(np.array([5, 6], np.int32), (num_tokens, 2))


@pytest.mark.parametrize("route, first_is_enough", [(level, True), (one_pair, False)])
def test_what_the_first_blocks_hold(route, first_is_enough, monkeypatch):
    """Where hosts get the same, all: no round follows. Where one gets more, the rounds bring the rest."""
    case = Hosts(K=2, sizes=(64,))  # 8 tokens of a rank, two hosts of four: blocks of 4
    topk = route(64)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    want = case.oracle(topk).dispatch(x)

    def rows(fori_loop, x):
        with monkeypatch.context() as patched:
            patched.setattr(two_level.jax.lax, "fori_loop", fori_loop)
            return np.asarray(on_mesh(case, lambda handle, x: dispatch(handle, x), topk, x))

    def no_rounds(first, last, body, received):
        return received

    np.testing.assert_array_equal(rows(jax.lax.fori_loop, x), want)
    # Of another width, as an op is not traced twice.
    assert (rows(no_rounds, x[:, :3]) == want[..., :3]).all() == first_is_enough


def on_mesh(case, function, topk, *arrays, **options):
    """`function(handle, *arrays)` of arrays whose first dimension all axes of the EP group split."""
    program, placed = program_on_mesh(case, function, topk, *arrays, **options)
    return program(*placed)


def program_on_mesh(case, function, topk, *arrays, axis_type=AxisType.Explicit, **changes):
    """The program of `on_mesh`, and its operands."""
    names, sizes = zip(*case.mesh, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names))
    sharding = NamedSharding(mesh, PartitionSpec(case.ep))
    config = dataclasses.replace(case.config, **changes)
    placed = [jax.device_put(x, sharding) for x in (topk, *arrays)]
    return jax.jit(lambda topk, *arrays: function(prepare(topk, config), *arrays)), placed


def both(handle, x):
    """An exchange of x, and the gradient of its rows: by two levels and by one."""
    results = []
    for transport in (None, "all_to_all"):
        rows, pull = jax.vjp(functools.partial(dispatch, handle, transport=transport), x)
        out = combine(handle, rows, transport=transport)
        results.append((rows, out, pull(rows)[0]))
    return results


@pytest.mark.parametrize("groups", [(None, None), (4, 2)])
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes"])
def test_equal_to_one_level_where_sums_are_exact(groups, kind):
    """Small integers: not a bit differs."""
    case = Hosts(groups=groups, sizes=(96,), E=16, K=4, A=8)
    topk = routing(kind, 96, 4, 16)
    x = np.random.default_rng(1).integers(-8, 8, (96, 5)).astype(jnp.bfloat16)
    two, one = on_mesh(case, both, topk, x)
    for a, b in zip(two, one, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert np.asarray(two[1], np.float32).any()


def test_the_same_bits_again():
    """Sums are in a fixed order."""
    case = Hosts(K=4)
    topk = routing("skewed", 40, 4, 8)
    x = magnitudes(np.random.default_rng(2), (40, 6), "bfloat16")
    step, placed = program_on_mesh(case, both, topk, x)
    first, second = (step(*placed)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@covering("payload", ["uint8", "float8_e5m2", "int32", "float16"], covers=["float8_e5m2", "int32"])
def test_dispatches_any_dtype(payload):
    case = Hosts(A=4)
    topk = routing("holes", 40, 3, 8)
    values = 2 ** np.random.default_rng(0).integers(0, 7, (40, 6))  # exact in each of them
    rows = on_mesh(case, dispatch, topk, jnp.asarray(values, payload))
    assert rows.dtype == payload
    np.testing.assert_array_equal(np.asarray(rows, np.float64), case.oracle(topk).dispatch(values))


FREE = TensorFormat(dtype="float8_e4m3fn", block=(1, 32), scale="float32")
E8M0 = TensorFormat(dtype="float8_e4m3fn", block=(1, 32), scale="float8_e8m0fnu")


@pytest.mark.parametrize(
    "transport, format",
    [("two_level:all_to_all", E8M0), ("two_level:ring", FREE), full("two_level", FREE)],
)
def test_quantized_rows(transport, format):
    """Bit for bit what quantizing the rows gives: padding too."""
    case = Hosts(A=8, transport=transport)
    topk = routing("holes", 40, 3, 8)
    x = magnitudes(np.random.default_rng(0), (40, 64))

    def both_orders(handle, x):
        first = dispatch(handle, quantize(x, format))
        then = grouped_quantize(dispatch(handle, x), handle.group_sizes, format)
        return (first.data, first.scale), (then.data, then.scale)

    first, then = on_mesh(case, both_orders, topk, x)
    for a, b in zip(first, then, strict=True):
        a, b = (np.asarray(q).view(np.uint8) for q in (a, b))
        assert len(np.unique(a)) > 2
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "wire, transport",
    [
        ("bfloat16", "two_level:all_to_all"),
        full("bfloat16", "two_level:ring"),
        full(E8M0, "two_level:all_to_all"),
        (E8M0, "two_level:ring"),
    ],
)
def test_sums_are_rounded_where_they_leave_the_host(transport, wire):
    """To 8 bits once for each host; to bfloat16 for each rank too, by what does not add on the way."""
    case = Hosts(mesh=(("host", 2), ("ep", 4)), E=8, K=6, transport=transport)
    topk = routing("uniform", 40, 6, 8)
    rows = np.random.default_rng(3).normal(size=(8, case.oracle(topk).C, 64)).astype(np.float32)
    oracle = case.oracle(topk)
    want = np.zeros((40, 64))
    for host in range(2):
        sums = np.zeros((40, 64), np.float32)
        for rank in range(4 * host, 4 * host + 4):
            own = np.zeros((40, 64), np.float32)
            for p, n, t, _ in oracle.live():
                if p == rank:
                    own[t] += rows[p, n]
            sums += own.astype(wire if wire == "bfloat16" else np.float32).astype(np.float32)
        want += _rounded(sums, wire)
    got = on_mesh(case, functools.partial(combine, wire_format=wire), topk, rows)
    # The order of sums may push one to the next number of the wire.
    assert relative_error(got, want) < 1e-3
    assert relative_error(got, oracle.combine(rows)) > 1.5e-3


def _rounded(sums, wire):
    if wire == "bfloat16":
        return sums.astype(jnp.bfloat16).astype(np.float64)
    return rounded(sums, wire, 1)


def test_padding_and_empty_places_are_never_read():
    """NaN in every row without a token, in both directions, and in tokens that go nowhere."""
    case = Hosts(K=2, groups=(4, 1), C=16)
    topk = routing("holes", 40, 2, 8)
    run, _ = compiled_run(case, "manual")
    oracle = case.oracle(topk)
    operands = list(operands_of(case, oracle, topk, "float32"))
    nowhere = (oracle.slot() < 0).all(axis=1)
    assert nowhere.any()
    operands[1] = np.where(nowhere[:, None], np.nan, operands[1])
    out = run(operands)
    assert np.isfinite(out["rows"]).all() and np.isfinite(out["out"]).all()
    assert np.isfinite(out["d_tokens"]).all()


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(axis=("ep",)), "EP group of two mesh axes, that over hosts first"),
        (dict(transport="ring"), "a handle that `prepare` made for it"),
    ],
)
def test_what_it_needs(changed, words):
    case = Hosts(mesh=(("host", 2), ("ep", 4)))
    topk, x = routing("uniform", 40, 3, 8), np.zeros((40, 4), np.float32)
    function = functools.partial(dispatch, transport="two_level")
    with pytest.raises(
        ValueError, match="transport='two_level' cannot run: .*use transport='auto'"
    ) as error:
        on_mesh(case, function, topk, x, **changed)
    assert words in str(error.value)


@pytest.mark.parametrize("function", [dispatch, combine])
def test_who_cannot_run_inside_a_host_is_who_was_called(function):
    case = Hosts(transport="two_level:all_to_all")
    topk, x = routing("uniform", 40, 3, 8), np.zeros((40, 4), np.float32)
    if function is combine:
        x = np.zeros((8, case.oracle(topk).C, 4), np.float32)
    with pytest.raises(ValueError, match=f"^{function.__name__}: transport='local' cannot run: "):
        on_mesh(case, functools.partial(function, transport="two_level:local"), topk, x)


@pytest.mark.parametrize(
    "of_devices, shape, axis, over",
    [
        ("0011", (2, 2), ("a", "b"), True),
        ("0011", (2, 2), ("b", "a"), False),  # ranks of one host in the first axis
        ("0101", (2, 2), ("b", "a"), True),
        ("0000", (2, 2), ("a", "b"), False),
        ("0123", (2, 2), ("a", "b"), False),  # the inner axis goes over hosts too
        ("00110011", (2, 2, 2), ("b", "c"), True),  # the groups of two data ranks
        ("00001111", (2, 2, 2), ("b", "c"), False),  # of which each is on one host
        ("00111111", (2, 2, 2), ("b", "c"), True),  # one on two hosts, one on one
        ("00110011", (2, 2, 2), ("a", "b", "c"), False),
        ("00001111", (2, 2, 2), ("a", "b", "c"), True),
    ],
)
def test_which_axis_is_over_hosts(of_devices, shape, axis, over):
    of_devices = np.reshape([int(host) for host in of_devices], shape)
    assert hosts.are_over(of_devices, "abc"[: len(shape)], axis) is over
    assert not hosts.are_over(None, "abc", axis)


def test_hosts_are_known_of_all_of_the_jobs_devices():
    names = ("host", "ep")
    np.testing.assert_array_equal(hosts.of_mesh(AbstractMesh((4, 2), names)), np.zeros((4, 2)))
    assert hosts.of_mesh(AbstractMesh((2, 2), names)) is None
    device = type("Device", (), dict(process_index=3))
    assert hosts.host_of(device) == 3
    device.slice_index = 0  # of GPUs: several processes on one host
    assert hosts.host_of(device) == 0


@pytest.fixture
def on_two_hosts(monkeypatch):
    monkeypatch.setattr(hosts, "host_of", lambda device: device.id // 4)


@pytest.mark.parametrize(
    "mesh, axis, transport, name",
    [
        ((2, 4), ("host", "ep"), "auto", "two_level"),
        ((2, 4), ("host", "ep"), "ring", "ring"),
        ((2, 4), ("ep", "host"), "auto", "auto"),
        ((2, 4), "ep", "auto", "auto"),
        ((4, 2), ("host", "ep"), "auto", "two_level"),  # hosts of two rows of the mesh
    ],
)
def test_auto_goes_between_hosts_where_the_group_does(on_two_hosts, mesh, axis, transport, name):
    axis_types = (AxisType.Explicit,) * 2
    sharding = NamedSharding(
        jax.make_mesh(mesh, ("host", "ep"), axis_types=axis_types), PartitionSpec(("host", "ep"))
    )
    config = EpConfig(num_experts=8, axis=axis, transport=transport)
    idx = jax.device_put(routing("uniform", 16, 2, 8), sharding)
    handle = jax.jit(prepare, static_argnums=1)(idx, config)
    assert handle.transport == name and (handle.host_row is None) == (name != "two_level")
    tokens = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=sharding)
    found = bootstrap(config, tokens, top_k=2).transport
    assert found == ("ring" if name == "auto" else name)

"""The MoE block and its gradients in float64 NumPy, one token and one choice at a time; and data for it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from core.router import router_oracle
from expertmesh.core import Activation
from expertmesh.core.mesh import MeshResource
from expertmesh.flax_moe import MoEConfig, param_shapes, param_specs

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def activate(h, activation):
    """h [2, F] or [F]."""
    act = ACTIVATIONS[activation.function]
    if not activation.gated:
        return act(h)
    limit = activation.limit or np.inf
    return act(np.minimum(h[0], limit)) * (np.clip(h[1], -limit, limit) + activation.up_offset)


def activation_gradient(h, d_a, activation):
    """By central differences, one half of a pair at a time."""
    steps = 1e-6 * np.eye(len(h))[:, :, None] if activation.gated else [1e-6]
    slopes = [(activate(h + e, activation) - activate(h - e, activation)) / 2e-6 for e in steps]
    return d_a * (np.stack(slopes) if activation.gated else slopes[0])


GPT_OSS = Activation(function="quick_gelu", limit=0.75, up_offset=1.0)
# Many options of a block at once.
MANY = dict(
    activation=GPT_OSS,
    shared_expert_dim=20,
    shared_expert_gate=True,
    num_chunks=2,
    remat="save_min",
    alignment=4,
)
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
RESOURCE = MeshResource(fsdp_resource="fsdp", ep_resource="ep")
TOKENS = PartitionSpec(("fsdp", "ep"))


class Result(NamedTuple):
    """What the block returns, and the gradients of sum(y * dy) + aux_loss + z_loss."""

    y: np.ndarray
    aux_loss: float
    z_loss: float
    tokens_per_expert: np.ndarray
    d_params: dict
    d_x: np.ndarray


class Data(NamedTuple):
    params: dict
    x: np.ndarray
    dy: np.ndarray


def make_config(**changes) -> MoEConfig:
    return MoEConfig(
        **{
            "num_experts": 8,
            "top_k": 2,
            "expert_dim": 12,
            "dtype": jnp.float32,
            "aux_loss_coeff": 0.5,
            "z_loss_coeff": 0.25,
            "use_bias": True,
            **changes,
        }
    )


def make_data(config: MoEConfig, shape=(8, 5, 16), seed=0) -> Data:
    """Tokens and experts of different magnitudes, biases that matter, and a cotangent of order 1."""
    rng = np.random.default_rng(seed)
    D, E = shape[-1], config.num_experts
    params = {}
    for name, dims in param_shapes(D, config).items():
        fan_in = {
            **{
                "gate_kernel": D,
                "wi": D,
                "shared_wi": D,
                "shared_gate": D,
                "latent_down": D,
                "latent_up": config.latent_dim,
                "wo": config.expert_dim,
            },
            "shared_wo": config.shared_expert_dim,
        }.get(name, 1)
        params[name] = rng.normal(size=dims) * fan_in**-0.5
    for name in ("wi", "wo"):
        params[name] *= 2.0 ** rng.integers(-1, 2, size=E).reshape(
            E, *[1] * (params[name].ndim - 1)
        )
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-2, 2, size=(*shape[:-1], 1))
    data = Data(params, x, rng.normal(size=shape))
    return jax.tree.map(lambda a: a.astype(np.float32), data)


def route(logits, config, bias=None):
    """Choices of one token, their weights, and d weights / d logits by central differences with the choices held.

    Refuses data whose choice hangs on rounding.
    """
    chosen, weights = router_oracle.route_token(logits, config.router, bias)
    columns = []
    for e in range(len(logits)):
        step = 1e-5 * np.eye(len(logits))[e]
        for moved in (logits + 10 * step, logits - 10 * step):
            again = router_oracle.route_token(moved, config.router, bias)[0]
            assert set(again) == set(chosen), "the data has a near tie"
        up, down = (
            router_oracle.route_token(logits + d, config.router, forced=chosen)[1]
            for d in (step, -step)
        )
        columns.append((up - down) / 2e-5)
    return chosen, weights, np.stack(columns, axis=1)


def feed_forward(x, dy, weight, wi, bi, wo, bo, activation):
    """One expert on one token: its output, and the gradients of weight * output . dy, but for the weight's."""
    h = np.tensordot(x, wi, 1) + bi
    a = activate(h, activation)
    d_out = weight * dy
    d_h = activation_gradient(h, wo @ d_out, activation)
    outer = np.tensordot(x, d_h, 0)
    return a @ wo + bo, (np.tensordot(wi, d_h, d_h.ndim), outer, d_h, np.outer(a, d_out), d_out)


def shared_gate(x, weight):
    """What a token's shared experts are multiplied by, and its derivative by x . weight."""
    if weight is None:
        return 1, 0
    gate = 1 / (1 + np.exp(-x @ weight))
    return gate, gate * (1 - gate)


def run(data: Data, config: MoEConfig, keep=lambda t, k: True, bias=None) -> Result:
    """The block by loops; choices for which `keep(token, k)` fails are dropped, `bias` steers the router."""
    params = {name: w.astype(np.float64) for name, w in data.params.items()}
    D, E, Z = data.x.shape[-1], config.num_experts, config.num_null_experts
    params.setdefault("wi_bias", np.zeros((E, *params["wi"].shape[2:])))
    params.setdefault("wo_bias", np.zeros((E, params["wo"].shape[-1])))
    down, up = (params.get(name, np.eye(D)) for name in ("latent_down", "latent_up"))
    x = data.x.astype(np.float64).reshape(-1, D)
    dy = data.dy.astype(np.float64).reshape(-1, D)
    y, d_x, d_logits = np.zeros_like(x), np.zeros_like(x), np.zeros((len(x), E + Z))
    d = {name: np.zeros_like(w) for name, w in params.items()}
    logits, counts = x @ params["gate_kernel"] + params.get("gate_bias", 0), np.zeros(E + Z, int)
    tree = ("wi", "wi_bias", "wo", "wo_bias")
    for t in range(len(x)):
        chosen, p, jacobian = route(logits[t], config, bias)
        d_weights = np.zeros(len(chosen))
        for k, e in enumerate(chosen):
            counts[e] += 1
            if not keep(t, k):
                continue
            if e >= E:
                if config.null_experts == "identity":
                    y[t] += p[k] * x[t]
                    d_weights[k] = dy[t] @ x[t]
                    d_x[t] += p[k] * dy[t]
                continue
            weights = [params[name][e] for name in tree]
            before, after = (p[k], 1) if config.weigh_inputs else (1, p[k])
            latent, d_out = x[t] @ down, up @ dy[t]
            out, (dx, *dw) = feed_forward(before * latent, d_out, after, *weights, config.act)
            y[t] += after * out @ up
            d_weights[k] = dx @ latent if config.weigh_inputs else d_out @ out
            d_x[t] += down @ (before * dx)
            if config.latent_dim is not None:
                d["latent_down"] += np.outer(x[t], before * dx)
                d["latent_up"] += np.outer(after * out, dy[t])
            for name, gradient in zip(tree, dw, strict=True):
                d[name][e] += gradient
        if config.shared_expert_dim is not None:
            wi, wo = params["shared_wi"], params["shared_wo"]
            gate, of_gate = shared_gate(x[t], params.get("shared_gate"))
            out, (dx, d_wi, _, d_wo, _) = feed_forward(x[t], dy[t], gate, wi, 0, wo, 0, config.act)
            y[t] += gate * out
            d_x[t] += dx
            if config.shared_expert_gate:
                slope = dy[t] @ out * of_gate
                d["shared_gate"] += slope * x[t]
                d_x[t] += slope * params["shared_gate"]
            d["shared_wi"] += d_wi
            d["shared_wo"] += d_wo
        d_logits[t] += d_weights @ jacobian
    aux, z, d_losses = losses(logits, counts, config)
    d_logits += d_losses
    d["gate_kernel"], d["gate_bias"] = x.T @ d_logits, d_logits.sum(axis=0)
    d_x += d_logits @ params["gate_kernel"].T
    d = {name: d[name] for name in data.params}
    return Result(y.reshape(data.x.shape), aux, z, counts, d, d_x.reshape(data.x.shape))


def losses(logits, counts, config):
    """Both losses and the cotangent of the logits."""
    T, E = logits.shape
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    lse = logits.max(axis=1) + np.log(p.sum(axis=1))
    p /= p.sum(axis=1, keepdims=True)
    scale = config.aux_loss_coeff * E / (config.top_k * T**2)
    aux = scale * np.sum(p.sum(axis=0) * counts)
    z = config.z_loss_coeff * np.mean(lse**2)
    d_logits = np.stack([scale * (np.diag(q) - np.outer(q, q)) @ counts for q in p])
    return aux, z, d_logits + config.z_loss_coeff * 2 / T * lse[:, None] * p


def make_mesh(shape, kind: AxisType):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, ("fsdp", "ep"), axis_types=(kind,) * 2, devices=devices)


def place(data: Data, config: MoEConfig, mesh) -> Data:
    """The data on the mesh: parameters as `param_specs` says, tokens over both axes."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, data)
    specs = param_specs(config, RESOURCE)
    return Data(
        {k: jax.device_put(w, NamedSharding(mesh, specs[k])) for k, w in data.params.items()},
        *jax.device_put((data.x, data.dy), NamedSharding(mesh, TOKENS)),
    )


def value_and_gradients(block, config):
    """A function of placed data: the block's output and the gradients of the oracle's scalar."""

    def loss(params, x, dy):
        out = block(params, x, config)
        return jnp.sum(out.y.astype(jnp.float32) * dy) + out.aux_loss + out.z_loss, out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def cosine(got, want) -> float:
    got, want = (np.asarray(a).astype(np.float64).ravel() for a in (got, want))
    return float(got @ want / (np.linalg.norm(got) * np.linalg.norm(want)))


def assert_result(output, gradients, want: Result, tolerance=1e-5, num_dropped=0):
    """Relative norms and cosines of everything the block returns and of its gradients."""
    pairs = {
        "y": (output.y, want.y),
        "aux_loss": (output.aux_loss, want.aux_loss),
        "z_loss": (output.z_loss, want.z_loss),
        "x": (gradients[1], want.d_x),
        **{name: (gradients[0][name], w) for name, w in want.d_params.items()},
    }
    for name, (got, expected) in pairs.items():
        got = np.asarray(got).astype(np.float64)
        norm = np.linalg.norm(np.ravel(expected))
        error = np.linalg.norm(np.ravel(got - expected))
        assert norm > 0 or name.endswith("loss"), name
        assert error <= tolerance * norm, f"{name}: relative error {error / norm:.1e}"
        assert norm == 0 or cosine(got, expected) > 1 - tolerance, name
    np.testing.assert_array_equal(output.tokens_per_expert, want.tokens_per_expert)
    chosen = np.asarray(output.topk_idx)
    np.testing.assert_array_equal(
        np.bincount(chosen[chosen >= 0], minlength=len(want.tokens_per_expert)),
        want.tokens_per_expert,
    )
    assert int(output.num_dropped) == num_dropped

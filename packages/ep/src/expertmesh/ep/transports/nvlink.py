"""Plain stores into the peers' memory, between GPUs that reach it: NVLink, or PCIe with peer access.

    dispatch: a token is stored once at each rank that has a row of it, and copied to its rows there
    combine:  each rank adds up its rows of a token and stores the sum at the token's rank, which adds the sums

Receives the tokens that have rows here, as "ragged" does. The kernels use XLA's own communicator: nothing is set up,
and a process may drive one GPU or many. See _native/exchange.cu for how ranks wait for each other.

Dimension key as in route.py.
"""

import dataclasses
from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from expertmesh.core.op import vary_like
from expertmesh.core.support import compute_capability
from expertmesh.ep import _native
from expertmesh.ep._native import kernels
from expertmesh.ep.capacity import roundup
from expertmesh.ep.route import Axis, Route, group_size
from expertmesh.ep.transports.choice import Exchange
from expertmesh.ep.wire import PLAIN, Wire, sum_dtype

MAX_RANKS, MAX_CHOICES = 64, 32
MIN_CAPABILITY = 9.0
WIRES = {"float32": 0, "bfloat16": 1, "float16": 2}  # what a sum can travel as; exchange.h


# NVIDIA H200, 2026-11-22: see docs/dev/kernels.md.
SMS = 132
SENT, COPIED = 27, 47  # GB/s of an SM: to the peers' memory, and from what arrived to rows
WARPS, STAGED = 16, 14336  # of an SM, and bytes of a warp that are on the way at most: exchange.h
FILLED = 3.6e6  # bytes on the way that keep a GPU's links busy; NVIDIA H200, 2026-11-30
TIMEOUT_MS = 60_000
BUSY = 4096  # warps that suffice to move tokens; of fewer tokens each is cut into slices, but not below SHORT bytes
MAX_SLICES, SHORT = 4, 512
ADDED, LONG = 8192, 4096  # sums of fewer tokens are cut in two at least, but not below LONG bytes
LINE = 128  # bytes; rows that begin within a line of memory take up to a tenth longer


@dataclasses.dataclass(frozen=True)
class Nvlink:
    """The transport.

    Attributes:
      sms: streaming multiprocessors of an exchange at most, >= 2. A thread block on each sends or receives.
    """

    sms: int = SMS

    def dispatch(self, tokens_TD: jax.Array, route: Route, *, axis: Axis) -> jax.Array:
        return self.dispatch_parts((tokens_TD,), route, axis=axis)[0]

    def dispatch_parts(
        self, parts_TD: tuple[jax.Array, ...], route: Route, *, axis: Axis
    ) -> tuple[jax.Array, ...]:
        """Dispatches several arrays in one exchange."""
        capacity = route.source_C.shape[0]
        types = [jax.ShapeDtypeStruct((capacity, x.shape[1]), x.dtype) for x in parts_TD]
        row_bytes = sum(roundup(x.shape[1] * x.dtype.itemsize, 16) for x in parts_TD)
        copies, rows = _copies(route, axis), capacity / route.slot_TK.shape[0]
        slices = _slices(route.slot_TK.shape[0], row_bytes)
        senders = min(self._senders(copies / SENT, rows / COPIED), _filling(row_bytes / slices))
        return self._call(
            _native.DISPATCH, types, parts_TD, route, axis, senders, row_bytes, slices
        )

    def combine(
        self, rows_CD: jax.Array, route: Route, *, axis: Axis, wire: Wire = PLAIN
    ) -> jax.Array:
        (num_tokens, top_k), num_features = route.slot_TK.shape, rows_CD.shape[1]
        name = str(wire.format or sum_dtype(rows_CD.dtype, top_k))
        types = [jax.ShapeDtypeStruct((num_tokens, num_features), rows_CD.dtype)]
        row_bytes = num_features * jnp.dtype(name).itemsize
        halves = min(2, ADDED // max(1, num_tokens), row_bytes // LONG)
        slices = max(halves, _slices(num_tokens, row_bytes))
        half, wire_type = self.sms // 2, WIRES[name]
        call = self._call(
            _native.COMBINE, types, (rows_CD,), route, axis, half, row_bytes, slices, wire_type
        )
        return call[0]

    def unsupported(self, exchange: Exchange) -> str | None:
        """Why the transport cannot do this exchange, or None."""
        if reason := platform_unsupported(exchange.platform):
            return reason
        if exchange.ep_size > MAX_RANKS or exchange.top_k > MAX_CHOICES:
            return (
                f"its kernels take {MAX_RANKS} ranks and {MAX_CHOICES} choices per token at most; "
                f"got ep_size={exchange.ep_size}, K={exchange.top_k}"
            )
        if jnp.dtype(exchange.dtype) == jnp.float64:
            return "its kernels add up in float32, and the rows are float64"
        if exchange.wire is not None and exchange.wire not in WIRES:
            return f"its kernels round sums to {', '.join(WIRES)}; got wire_format={exchange.wire}"
        return None

    def _senders(self, sends: float, receives: float) -> int:
        """The blocks that send, of so much work to send and to receive."""
        return min(max(round(self.sms * sends / (sends + receives)), 1), self.sms - 1)

    def _call(
        self,
        target: str,
        types: Sequence[jax.ShapeDtypeStruct],
        payload: tuple[jax.Array, ...],
        route: Route,
        axis: Axis,
        senders: int,
        row_bytes: int,
        slices: int,
        wire: int = 0,
        staging_rows: int | None = None,
    ) -> tuple[jax.Array, ...]:
        if any(0 in x.shape for xs in (types, payload) for x in xs):
            return tuple(jnp.zeros(x.shape, x.dtype) for x in types)
        capability = compute_capability()
        if capability is not None:  # else the program is lowered where there is no GPU
            _native.load(kernels.architecture(capability))
        operands = (route.slot_TK, route.source_C, route.row_GK, *payload)
        call = jax.ffi.ffi_call(target, types, vmap_method="sequential")
        results = call(
            *operands,
            groups=_groups(axis),
            size=np.int64(group_size(axis)),
            rows=np.int64(staging_rows or route.row_GK.shape[0]),
            stride=np.int64(roundup(row_bytes, LINE)),
            slices=np.int64(slices),
            wire=np.int64(wire),
            senders=np.int64(senders),
            receivers=np.int64(self.sms - senders),
            timeout_ms=np.int64(TIMEOUT_MS),
        )
        return tuple(vary_like(operands, list(results)))


def _copies(route: Route, axis: Axis) -> float:
    """How many other ranks a token goes to, if all experts are as likely."""
    size, top_k = group_size(axis), route.slot_TK.shape[1]
    return (size - 1) * (1 - (1 - 1 / size) ** top_k)


def platform_unsupported(platform: str) -> str | None:
    """Why the transport cannot run on JAX's lowering platform of that name, or None."""
    if platform != "cuda":
        return f"it needs NVIDIA GPUs, and the platform is {platform}"
    capability = compute_capability()
    if capability is None:
        return None
    if capability < MIN_CAPABILITY:
        return f"its kernels need compute capability {MIN_CAPABILITY}, and the GPU has {capability}"
    return _native.unsupported()


def _slices(num_tokens: int, row_bytes: int) -> int:
    """Parts in which a row is moved, by a warp each."""
    return max(1, min(MAX_SLICES, BUSY // max(1, num_tokens), row_bytes // SHORT))


def _filling(row_bytes: float) -> int:
    """Senders that keep the links busy with such rows. More put rows into them faster than they leave, which then
    arrive long after their turn."""
    return max(1, round(FILLED / (WARPS * min(max(row_bytes, 1), STAGED))))


def _groups(axis: Axis) -> np.ndarray:
    """int64[N]: the EP groups one after the other, each in order of ranks; devices by their place in the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    places = np.arange(prod(mesh.axis_sizes)).reshape(mesh.axis_sizes)
    ep = [mesh.axis_names.index(name) for name in axis or ()]
    others = [i for i in range(places.ndim) if i not in ep]
    return places.transpose(*others, *ep).reshape(-1)

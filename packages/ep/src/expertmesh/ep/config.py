"""What an expert-parallel exchange is: EpConfig."""

import dataclasses

from expertmesh.core.config import Config
from expertmesh.core.operands import check_counts
from expertmesh.core.specs import is_axis
from expertmesh.ep.transports import BY_NAME
from expertmesh.ep.transports.names import parse

TRANSPORTS = ("auto", *BY_NAME)
OVERFLOW_POLICIES = ("drop", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig(Config):
    """One exchange between tokens and experts. Hashable; pass it whole.

    Attributes:
      num_experts: E, over all ranks of the EP group; rank r holds experts [r * E / R, (r + 1) * E / R).
      capacity: C, receive rows per participant, a multiple of `alignment`. None: `recv_capacity` of the call's
        shapes, which never drops a row as long as each token's experts are different.
      alignment: each expert's rows are padded to a multiple of it, a power of two; 1 means no padding.
      transport: one of the table in docs/expert-parallelism.md, such as "ring" or "nvlink", or "nvlink:48", the same on
        at most 48 SMs, or "two_level:nvlink", between hosts and then "nvlink" inside them. "auto" takes "two_level" if
        the first of several EP axes goes over hosts and the others stay inside one. It takes "nvlink" if all GPUs of
        the job are known to reach each other over NVLink and its kernels can be compiled. Otherwise it takes the one of
        "local", "ring" and "all_to_all" that moves the fewest bytes.
      axis: mesh axis (or tuple of axes, major first) of the EP group. None: `ep_resource` of the MeshResource in
        context, which must name one; without a MeshResource no expert parallelism. (): no expert parallelism.
      overflow: "drop" or "error". Rows at positions >= capacity are dropped, counted and contribute 0, and the program
        runs on, either way. Under "error" `raise_overflow`, called outside jit, raises then, and a capacity below the
        tokens of one participant is refused at once.
      debug: checks values (ids >= num_experts) if the program runs under `jax.experimental.checkify.checkify`. Off by
        default: such a check is an effect, which `flax.linen.scan` refuses.
      num_groups, group_topk: those of the router (`expertmesh.core.RouterConfig`). A token's experts are in at most
        `group_topk` of `num_groups` equal groups, so it is sent to fewer hosts; None: no groups. "two_level" sizes its
        first blocks by them. Choices that break the rule are exchanged all the same, in more rounds.

    Raises:
      ValueError, TypeError: a field that breaks its rule.
    """

    num_experts: int
    capacity: int | None = None
    alignment: int = 1
    transport: str = "auto"
    axis: str | tuple[str, ...] | None = None
    overflow: str = "drop"
    debug: bool = False
    num_groups: int | None = None
    group_topk: int | None = None

    def __post_init__(self) -> None:
        self._normalize()
        check_counts("EpConfig", num_experts=self.num_experts, alignment=self.alignment)
        check_counts("EpConfig", optional=True, capacity=self.capacity)
        if self.alignment & (self.alignment - 1):
            raise ValueError(
                f"EpConfig: alignment must be a power of two; got alignment={self.alignment}; "
                "use 1 for no padding"
            )
        if self.capacity is not None and self.capacity % self.alignment:
            raise ValueError(
                f"EpConfig: capacity must be a multiple of alignment; got capacity={self.capacity}, "
                f"alignment={self.alignment}; round it up, as recv_capacity does"
            )
        check_transport("EpConfig", self.transport)
        if self.overflow not in OVERFLOW_POLICIES:
            raise ValueError(
                f"EpConfig: overflow must be one of {', '.join(OVERFLOW_POLICIES)}; "
                f"got overflow={self.overflow!r}; use 'drop'"
            )
        _check_axis(self.axis)
        _check_groups(self.num_groups, self.group_topk)


def _check_groups(num_groups: int | None, group_topk: int | None) -> None:
    check_counts("EpConfig", optional=True, num_groups=num_groups, group_topk=group_topk)
    if (num_groups is None) != (group_topk is None):
        raise ValueError(
            "EpConfig: num_groups and group_topk must go together; got "
            f"num_groups={num_groups}, group_topk={group_topk}; pass both of the router's, or neither"
        )


def _check_axis(axis: object) -> None:
    if axis is not None and not is_axis(axis):
        raise TypeError(
            "EpConfig: axis must be a mesh axis name, a tuple of names, each once, or None; "
            f"got axis={axis!r}; write for example axis='ep'"
        )


def check_transport(function: str, name: object) -> None:
    if isinstance(name, str) and _is_transport(name):
        return
    raise ValueError(
        f"{function}: transport must be one of {', '.join(TRANSPORTS)}, or 'nvlink:N' for at most N >= 2 SMs, or "
        f"'two_level:' and another of them; got transport={name!r}; use 'auto'"
    )


def _is_transport(name: str) -> bool:
    base, _, inside = parse(name)
    return base in TRANSPORTS and (inside is None or _is_transport(inside))

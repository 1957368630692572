"""How experts are chosen and weighted, as a value."""

import dataclasses

import jax

from expertmesh.core.config import Config
from expertmesh.core.operands import FLOATS, check_arrays, check_counts, check_numbers
from expertmesh.core.router.scores import check_score_function

__all__ = ["RouterConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig(Config):
    """How experts are chosen and weighted. A hashable value.

    Attributes:
      top_k: choices per token, at least 1 and at most the number of experts.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      use_pre_softmax: softmax over all experts before the choice, weights not renormalised; else softmax over the K
        chosen logits, so that a token's weights sum to 1. Only for softmax.
      num_groups: the number of equal groups of neighbouring experts; None: no groups.
      group_topk: choices come from the best `group_topk` groups, by the sum of each one's `group_best` greatest
        (biased) scores. Given if and only if `num_groups` is.
      group_best: how many of a group's best experts its score sums: 1 in DeepSeek-V2, 2 in DeepSeek-V3. None: top_k /
        group_topk, a group's share of the choices.
      normalize: whether the scores of the chosen experts are divided by their sum. None: yes if K > 1. Only for sigmoid
        and sqrtsoftplus; for softmax `use_pre_softmax` decides.
      scaling_factor: the weights are multiplied by it.

    Raises:
      ValueError: a value outside these; a top_k that group_topk does not divide, where `group_best` is None.
      TypeError: a count that is not an int, a normalize that is not a bool, a scaling_factor that is not a number.
    """

    top_k: int
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_best: int | None = None
    normalize: bool | None = None
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        self._normalize()
        check_counts("RouterConfig", top_k=self.top_k)
        check_score_function("RouterConfig", self.score_function)
        if self.use_pre_softmax and self.score_function != "softmax":
            raise ValueError(
                "RouterConfig: use_pre_softmax must be False unless score_function is 'softmax'; "
                f"got score_function={self.score_function!r}; leave it out"
            )
        self._check_normalize()
        self._check_own_groups()
        check_numbers("RouterConfig", "take 1 for none", scaling_factor=self.scaling_factor)

    @property
    def divides(self) -> bool:
        """Whether scores of the chosen are divided by their sum, where they are not softmax."""
        return self.top_k > 1 if self.normalize is None else self.normalize

    @property
    def best_of_group(self) -> int:
        """How many experts a group's score sums, where there are groups."""
        return self.group_best or self.top_k // (self.group_topk or 1)

    def _check_normalize(self) -> None:
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise TypeError(
                f"RouterConfig: normalize must be a bool or None; got normalize={self.normalize!r}; pass True or False"
            )
        if self.normalize is not None and self.score_function == "softmax":
            raise ValueError(
                "RouterConfig: normalize must be None for softmax, where use_pre_softmax decides; "
                f"got normalize={self.normalize}; leave it out"
            )

    def _check_own_groups(self) -> None:
        check_counts("RouterConfig", optional=True, group_best=self.group_best)
        if self.num_groups is None and self.group_topk is None:
            self._check_no_group_best()
            return
        got = f"got num_groups={self.num_groups}, group_topk={self.group_topk}, top_k={self.top_k}"
        if self.num_groups is None or self.group_topk is None:
            raise ValueError(
                f"RouterConfig: num_groups and group_topk must be given together; {got}; pass both or none"
            )
        check_counts("RouterConfig", num_groups=self.num_groups, group_topk=self.group_topk)
        if self.group_topk > self.num_groups:
            raise ValueError(
                f"RouterConfig: group_topk must be at most num_groups; {got}; lower group_topk"
            )
        if self.group_best is None and self.top_k % self.group_topk:
            raise ValueError(
                f"RouterConfig: top_k must be divisible by group_topk; {got}; change one of them, or give group_best"
            )

    def _check_no_group_best(self) -> None:
        if self.group_best is not None:
            raise ValueError(
                "RouterConfig: group_best must go with num_groups and group_topk; "
                f"got group_best={self.group_best}, num_groups=None; pass all three, or leave it out"
            )

    def check_experts(self, function: str, num_experts: int) -> None:
        """Refuses choices and groups that do not fit the number of experts.

        Raises:
          ValueError: top_k exceeds it, num_groups does not divide it, or a group holds fewer than `group_best` or than
            top_k / group_topk.
        """
        if self.top_k > num_experts:
            raise ValueError(
                f"{function}: top_k must be at most the number of experts; got top_k={self.top_k}, "
                f"num_experts={num_experts}; lower top_k"
            )
        if self.num_groups is None or self.group_topk is None:
            return
        if num_experts % self.num_groups:
            raise ValueError(
                f"{function}: the number of experts must be divisible by num_groups; "
                f"got {num_experts} experts, num_groups={self.num_groups}; change num_groups"
            )
        size = num_experts // self.num_groups
        got = f"num_groups={self.num_groups}, {num_experts} experts"
        if self.top_k > self.group_topk * size:
            raise ValueError(
                f"{function}: a group must hold at least top_k / group_topk experts; got top_k={self.top_k}, "
                f"group_topk={self.group_topk}, {got}; raise group_topk"
            )
        if self.best_of_group > size:
            raise ValueError(
                f"{function}: a group must hold at least group_best experts; got group_best={self.group_best}, "
                f"{got}; lower group_best"
            )

    def check_bias(self, function: str, expert_bias: jax.Array, num_experts: int) -> None:
        """Refuses a bias that is not float[num_experts].

        Raises:
          ValueError: another shape.
          TypeError: not floating point.
        """
        check_arrays(function, FLOATS, expert_bias=expert_bias)
        if expert_bias.shape != (num_experts,):
            raise ValueError(
                f"{function}: expert_bias must be [E]; got expert_bias.shape={expert_bias.shape}, "
                f"{num_experts} experts; pass one value per expert"
            )

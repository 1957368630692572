"""What a Mixture-of-Experts block is given and what it returns."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from expertmesh.core.config import Config
from expertmesh.core.op import check_reduce_dtype
from expertmesh.core.operands import as_dtype, check_counts, check_numbers
from expertmesh.core.ops.activation import Activation, check_activation
from expertmesh.core.quantization.recipe import (
    DelayedScaling,
    Recipe,
    as_recipe,
    required_alignment,
)
from expertmesh.core.router.route import RouterConfig
from expertmesh.core.specs import is_axis
from expertmesh.ep import EpConfig, Overflow
from expertmesh.ep.transports.names import parse
from expertmesh.flax_moe.remat import REMAT_POLICIES

__all__ = ["MoEConfig", "MoEOutput", "NULL_EXPERTS", "dispatches_quantized"]

NULL_EXPERTS = ("zero", "identity")

# Sums are float32, so that float64 would promise what they do not keep.
_DTYPES: dict[str, tuple[str, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "param_dtype": ("bfloat16", "float16", "float32", "float64"),
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """One MoE block. A hashable value and a pytree without leaves: pass it to any transformation, or close over it.

    What it shares with RouterConfig and EpConfig has their names, defaults and rules.

    Attributes:
      num_experts: E, over all devices.
      top_k: K, choices per token.
      expert_dim: F, width of an expert's hidden layer.
      activation: the name of a gated activation's function, one of `expertmesh.core.ACTIVATIONS`, or an
        `expertmesh.core.Activation`, which can lack the gate, clamp or add an offset. A name is kept as a name.
      separate_wi: whether the gate and up projections are two parameters, `wi_0` and `wi_1` [E, D, F], in place of
        `wi`, in the trees of `init_params`, `param_shapes`, `param_specs` and the modules; biases and shared experts
        likewise. The block takes either tree, whatever this option says; see `split_wi`.
      use_bias: whether there are the biases `wi_bias` and `wo_bias`; a tree that has them needs no `use_bias`.
      shared_expert_dim: width of a dense feed-forward that every token passes; its result is added to the experts' sum.
        n shared experts of width f are one of width n f. None: there is none.
      shared_expert_gate: whether there is a `shared_gate` [D]. The shared experts then add sigmoid(x . shared_gate)
        shared(x), as in Qwen2-MoE and Qwen3-Next; otherwise they add shared(x).
      latent_dim: L, the width at which the experts work. `latent_down` [D, L] precedes the dispatch and `latent_up` [L,
        D] follows the combine, so rows of width L travel between devices. `wi` is then [E, L, 2, F] and `wo` [E, F, L].
        The router, shared and null experts see x. None: experts work on x.
      num_null_experts: Z, experts without weights, as in LongCat-Flash. They are the last of the E + Z that the router
        chooses among, and a choice of one sends no row. The gate, `expert_bias`, counts, entropy, groups and both
        losses cover all E + Z, so the balance loss is smallest if null experts get their share of choices.
        `capacity_factor` counts as if every choice were sent.
      null_experts: what a null expert adds to y: "zero" adds nothing, "identity" adds w x, w being its weight.
      weigh_inputs: whether the routing weight w multiplies the expert's input, y = E(w x), as in Llama-4, and not its
        output, y = w E(x). Only for top_k = 1.
      use_gate: whether there is a `gate_kernel`. Without one the router is outside: pass `logits` to `moe`, or choices
        and their weights. A tree without a gate needs no `use_gate=False`.
      use_gate_bias: whether there is a `gate_bias` [E] and the logits are x @ gate_kernel + gate_bias, as in gpt-oss; a
        tree that has it needs no `use_gate_bias`.
      use_expert_bias: whether there is an `expert_bias` [E], which steers the choice and is never trained. The modules
        hold it; you pass it to `moe`.
      aux_loss_coeff: coefficient of the load-balancing loss; 0 leaves it out.
      aux_loss_per_sequence: balance each sequence, the last dimension of tokens, by itself.
      aux_loss_counts: which choices the load-balancing loss counts. "chosen": those that are made, by bias, groups and
        replay. "unbiased": each token's top_k by its scores alone, as in DeepSeek-V3 (arXiv:2412.19437, eq. 18),
        Megatron and MaxText.
      z_loss_coeff: coefficient of the router z-loss; 0 leaves it out.
      dtype: of the experts' computation and of what is sent between devices: bfloat16, float16 or float32. The router
        computes in float32.
      param_dtype: of the parameters: one of those, or float64.
      recipe: how the GEMMs of experts and shared experts are quantized: whatever `expertmesh.core.as_recipe` takes,
        kept as that recipe. None: the one of `expertmesh.core.autocast` around the call of `moe`, if there is one. The
        router is never quantized.
      quantize_backward_combine: whether the gradients of the dispatched tokens travel in the 8-bit format of the
        recipe's gradients, as each device's sums, and not in `dtype`. Only for recipes under which tokens are
        dispatched in 8 bits, and not for "ring", which adds on the way in float32.
      reduce_dtype: dtype of the gradients' reduction over devices, for the weights of experts and shared experts:
        float32 (exact but for the order), or bfloat16 or float16 for half the bytes. Each of n devices' parts is then
        rounded, and each of the n - 1 sums: in bfloat16 the relative error of a sum is about 2^-9 sqrt(n), and it does
        not fall with the number of tokens. float16 overflows above 65504. Other parameters' gradients are always added
        in float32.
      num_chunks: the number of parts in which tokens are exchanged and computed, one after the other. Receive buffers
        for the worst case are as many times smaller. A part is every num_chunks-th token of each shard, with its own
        capacity.
      remat: what each part keeps for its backward: a name from `expertmesh.flax_moe.remat.REMAT_POLICIES`.
      shard_exp_on_fsdp: whether fsdp splits the experts' weights along E, behind ep, and not along D (MaxText's name).
        Weights that are gathered, and gradients that are scattered, then lie in memory as they are sent, so nothing
        copies them, and each quantizer's block or expert is on one device. fsdp times ep must divide E. Over Explicit
        axes the arrays' types say where they are; there the option matters to `param_specs` alone.
      score_function, use_pre_softmax, num_groups, group_topk, group_best, normalize, scaling_factor: see
        `expertmesh.core.RouterConfig`, the type of `router`.
      transport, overflow, debug: see `expertmesh.ep.EpConfig`, which `exchange` returns, with the router's groups.
      alignment: that of EpConfig, a multiple of what the recipe needs; None: what the recipe needs. `row_alignment` is
        the result.
      capacity_factor: None: no token is ever dropped, the receive buffer holds the worst case. A number f >= 1: the
        buffer holds f times the rows of balanced routing; what does not fit is dropped and counted.
      num_spare_experts: S, spare slots of each rank of the EP group; 0: none. Each call plans anew which experts are
        copied to them, so that ranks compute equally many rows; it copies weights there and gradients back
        (`expertmesh.ep.balance`). The receive buffer then holds `capacity_factor` times a rank's share of the choices
        (once, if that is None). Rows that copies cannot level are dropped and counted. Not under `shard_exp_on_fsdp`,
        nor under DelayedScaling, whose state is that of the E experts.
      least_rows_per_copy: each copy takes more rows than this, and buffers are as many rows longer;
        `expertmesh.ep.least_rows_of_a_copy` computes a number.
      ep_axis: mesh axis (or tuple of axes) that experts are sharded over; None: the MeshResource's `ep_resource` if
        there is one, else read from the types of the arrays.

    Raises:
      ValueError: a value outside its range; an alignment that the recipe does not take.
      TypeError: a value of the wrong type.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    activation: str | Activation = "silu"
    separate_wi: bool = False
    use_bias: bool = False
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    latent_dim: int | None = None
    num_null_experts: int = 0
    null_experts: str = "zero"
    weigh_inputs: bool = False
    use_gate: bool = True
    use_gate_bias: bool = False
    use_expert_bias: bool = False
    aux_loss_coeff: float = 0.0
    aux_loss_per_sequence: bool = False
    aux_loss_counts: str = "chosen"
    z_loss_coeff: float = 0.0
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    recipe: Recipe | Any | None = None  # given as whatever `as_recipe` takes, kept as a Recipe
    quantize_backward_combine: bool = False
    reduce_dtype: Any = jnp.float32
    num_chunks: int = 1
    remat: str = "save_all"
    shard_exp_on_fsdp: bool = False
    # The router's, and top_k.
    score_function: str = RouterConfig.score_function
    use_pre_softmax: bool = RouterConfig.use_pre_softmax
    num_groups: int | None = RouterConfig.num_groups
    group_topk: int | None = RouterConfig.group_topk
    group_best: int | None = RouterConfig.group_best
    normalize: bool | None = RouterConfig.normalize
    scaling_factor: float = RouterConfig.scaling_factor
    # The exchange's, and num_experts.
    transport: str = EpConfig.transport
    overflow: str = EpConfig.overflow
    debug: bool = EpConfig.debug
    alignment: int | None = None
    capacity_factor: float | None = None
    num_spare_experts: int = 0
    least_rows_per_copy: int = 0
    ep_axis: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._normalize()
        kept = {
            "dtype": _float_dtype("dtype", self.dtype),
            "param_dtype": _float_dtype("param_dtype", self.param_dtype),
            "reduce_dtype": check_reduce_dtype("MoEConfig", self.reduce_dtype),
            "activation": _check_activation(self.activation),
            "recipe": as_recipe(self.recipe),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        check_counts("MoEConfig", num_experts=self.num_experts, top_k=self.top_k)
        check_counts("MoEConfig", expert_dim=self.expert_dim, num_chunks=self.num_chunks)
        check_counts("MoEConfig", optional=True, shared_expert_dim=self.shared_expert_dim)
        check_counts("MoEConfig", optional=True, latent_dim=self.latent_dim)
        coeffs = dict(aux_loss_coeff=self.aux_loss_coeff, z_loss_coeff=self.z_loss_coeff)
        check_numbers("MoEConfig", "0 turns it off", least=0, **coeffs)
        if self.capacity_factor is not None:
            factor = dict(capacity_factor=self.capacity_factor)
            check_numbers("MoEConfig", "pass None for no dropping", least=1, **factor)
        _check_ep_axis(self.ep_axis)
        _check_choices(self)
        _check_spare_experts(self)
        # The parts refuse what is wrong with their fields.
        self.exchange(axis=())
        _check_variant(self)
        self.router.check_experts("MoEConfig", self.num_candidates)
        _check_alignment(self)
        _check_backward_combine(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config of a dict. An activation may be a name or a dict, a recipe anything that `as_recipe` takes."""
        activation = fields.get("activation") if isinstance(fields, Mapping) else None
        if isinstance(activation, Mapping):
            fields = {**fields, "activation": Activation.from_dict(activation)}
        return super().from_dict(fields)

    @property
    def act(self) -> Activation:
        """The activation, whichever way it was named."""
        return Activation.of(self.activation)

    @property
    def num_candidates(self) -> int:
        """E + Z, what the router chooses among."""
        return self.num_experts + self.num_null_experts

    @property
    def router(self) -> RouterConfig:
        """The router's part."""
        return _part(RouterConfig, self)

    @property
    def row_alignment(self) -> int:
        """Each expert's rows are padded to a multiple of this: `alignment`, or if that is None what `recipe` needs.

        See `expertmesh.core.required_alignment`. Results do not depend on it.
        """
        return required_alignment(self.recipe) if self.alignment is None else self.alignment

    def exchange(self, *, axis: tuple[str, ...], capacity: int | None = None) -> EpConfig:
        """The expert-parallel part.

        Args:
          axis: mesh axes of the EP group.
          capacity: receive rows per participant; None: the worst case.
        """
        own: dict[str, Any] = {}
        if self.num_null_experts:  # groups are of null experts too, which are on no host
            own = dict(num_groups=None, group_topk=None)
        alignment = self.row_alignment
        return _part(EpConfig, self, axis=axis, capacity=capacity, alignment=alignment, **own)

    def under(self, recipe: Recipe | None) -> "MoEConfig":
        """This config with `recipe`, the one in context, if it has none of its own.

        Raises:
          ValueError: an alignment or option that the recipe does not take.
        """
        if self.recipe is None and recipe is not None:
            return dataclasses.replace(self, recipe=recipe)
        if self.recipe is None and self.quantize_backward_combine:
            raise ValueError(
                "moe: quantize_backward_combine must go with a recipe; got recipe=None, and none in context; "
                "pass MoEConfig(recipe=...) or call it under autocast(...)"
            )
        return self


class MoEOutput(NamedTuple):
    """The result of a MoE block. Inside your own `shard_map`, every number is about the shard's tokens alone.

    Attributes:
      y: [..., D] in the input's dtype.
      aux_loss: float32[], coefficient included; 0 where that is 0.
      z_loss: float32[], coefficient included; 0 where that is 0.
      tokens_per_expert: int32[E], (token, k) choices of each expert over all tokens, dropped ones included; with Z null
        experts int32[E + Z].
      num_dropped: int32[], choices that did not fit the receive buffers, over all devices.
      entropy: float32[], in nats, of the router's scores; see `expertmesh.core.RouterStatistics`. None where there are
        no logits.
      topk_idx: int32[..., K], the choices by descending score, -1 for a choice that is not routed. Record them to
        replay the routing.
      overflow: under `MoEConfig(overflow="error")`, for `expertmesh.ep.raise_overflow` outside jit; with `num_chunks` n
        above 1, and tokens, its arrays are [n]. None otherwise.
      quant_state: the next call's `quant_state`; None unless the recipe is a DelayedScaling.
    """

    y: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    num_dropped: jax.Array
    entropy: jax.Array | None
    topk_idx: jax.Array
    overflow: Overflow | None = None
    quant_state: Any = None

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """What to watch while training, as arrays that any logger takes; computed where it is read, traced or not.

        If the arrays of the output are stacked, as by a scan over layers, each metric has their leading dimensions.

        Returns:
          `tokens_per_expert` int32[E], and float32[]: `load_imbalance`, the most tokens of an expert over the mean (1
          if all have as many); `load_entropy`, the entropy of the experts' shares over log E (1 if all have as many, 0
          if one has all); `dropped_fraction` of all choices; `aux_loss`; `z_loss`; and `router_entropy` in nats, if
          there are logits. Without a choice `load_imbalance` and `load_entropy` are 0. No communication: all of it is
          replicated. Bytes of exchanges follow from shapes: `exchange_bytes`.
        """
        counts = self.tokens_per_expert.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(counts, axis=-1), 1)
        shares, experts = counts / total[..., None], counts.shape[-1]
        entropy = -jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)), axis=-1)
        found = {
            "tokens_per_expert": self.tokens_per_expert,
            "load_imbalance": jnp.max(shares, axis=-1) * experts,
            "load_entropy": entropy / max(math.log(experts), 1e-9),
            "dropped_fraction": self.num_dropped / total,
            "aux_loss": self.aux_loss,
            "z_loss": self.z_loss,
        }
        return found if self.entropy is None else found | {"router_entropy": self.entropy}


def dispatches_quantized(recipe: Recipe | None) -> TypeGuard[Recipe]:
    """Whether tokens are quantized before they are dispatched: to 8 bits, with scales of a token's own."""
    if recipe is None:
        return False
    x = recipe.formats().x
    return x.block is not None and x.block[0] == 1 and x.dtype.startswith("float8")


def _part[Part: (RouterConfig, EpConfig)](
    kind: type[Part], config: MoEConfig, **own: object
) -> Part:
    """A part's config: its fields are those of the block by the same names, but for `own`."""
    names = {field.name for field in dataclasses.fields(kind)} - own.keys()
    fields: dict[str, Any] = own | {name: getattr(config, name) for name in names}
    return kind(**fields)


def _check_gate_bias(config: MoEConfig) -> None:
    if config.use_gate_bias and not config.use_gate:
        raise ValueError(
            "MoEConfig: use_gate_bias must go with a gate; got use_gate=False; add the bias to the logits outside"
        )


def _check_variant(config: MoEConfig) -> None:
    """Raises where options of the block's formula do not go together."""
    check_counts("MoEConfig", least=0, num_null_experts=config.num_null_experts)
    _check_gate_bias(config)
    _check_shared_gate(config)
    _check_separate_wi(config)
    _check_weigh_inputs(config)


def _check_shared_gate(config: MoEConfig) -> None:
    if config.shared_expert_gate and config.shared_expert_dim is None:
        raise ValueError(
            "MoEConfig: shared_expert_gate must go with shared experts; got shared_expert_dim=None; give their width, "
            "or leave shared_expert_gate out"
        )


def _check_separate_wi(config: MoEConfig) -> None:
    if config.separate_wi and not config.act.gated:
        raise ValueError(
            "MoEConfig: separate_wi must go with an activation with a gate; "
            f"got activation={config.activation}, which has one projection; leave separate_wi out"
        )


def _check_weigh_inputs(config: MoEConfig) -> None:
    if config.weigh_inputs and config.top_k != 1:
        raise ValueError(
            "MoEConfig: weigh_inputs must go with top_k=1, as y = E(w x) is said of one expert; "
            f"got top_k={config.top_k}; leave it out, and each expert's result is weighted: y = sum_k w_k E_k(x)"
        )


def _check_choices(config: MoEConfig) -> None:
    """Raises where a field that names one of several things names none of them."""
    for name, choices, remedy in (
        ("remat", tuple(REMAT_POLICIES), "use 'save_all' to recompute nothing"),
        ("aux_loss_counts", ("chosen", "unbiased"), "use 'chosen' for the choices that are made"),
        ("null_experts", NULL_EXPERTS, "use 'zero' for no contribution, 'identity' for w x"),
    ):
        if (value := getattr(config, name)) not in choices:
            raise ValueError(
                f"MoEConfig: {name} must be one of {', '.join(choices)}; got {name}={value!r}; {remedy}"
            )


def _check_alignment(config: MoEConfig) -> None:
    least = required_alignment(config.recipe)
    if config.row_alignment % least:
        raise ValueError(
            f"MoEConfig: alignment must be a multiple of {least} under this recipe; got alignment={config.alignment}, "
            f"recipe={config.recipe}; leave it out for {least}"
        )


def _check_spare_experts(config: MoEConfig) -> None:
    check_counts("MoEConfig", least=0, num_spare_experts=config.num_spare_experts)
    check_counts("MoEConfig", least=0, least_rows_per_copy=config.least_rows_per_copy)
    if not config.num_spare_experts:
        return
    if config.shard_exp_on_fsdp:
        raise ValueError(
            "MoEConfig: num_spare_experts must go with experts that ep alone splits; got shard_exp_on_fsdp=True; "
            "leave one of them out"
        )
    if isinstance(config.recipe, DelayedScaling):
        raise ValueError(
            "MoEConfig: num_spare_experts must go with a recipe without state, which is of experts and not of slots; "
            f"got recipe={config.recipe}; use Float8CurrentScaling or Float8BlockScaling"
        )


def _check_backward_combine(config: MoEConfig) -> None:
    if not config.quantize_backward_combine:
        return
    if parse(config.transport).adds_on_the_way:
        raise ValueError(
            "MoEConfig: quantize_backward_combine must go with a transport that does not add on the way; "
            "got transport='ring'; use 'auto' or 'all_to_all'"
        )
    if config.recipe is not None and not dispatches_quantized(config.recipe):
        raise ValueError(
            "MoEConfig: quantize_backward_combine must go with a recipe of 8-bit blocks within a token; "
            f"got recipe={config.recipe}; use Float8BlockScaling or MXFP8BlockScaling, or leave it out"
        )


def _check_activation(activation: str | Activation) -> str | Activation:
    """The activation, as a name where it is only one."""
    check_activation("MoEConfig", activation)
    function = Activation.of(activation).function
    return function if activation == Activation(function=function) else activation


def _check_ep_axis(value: object) -> None:
    if value == () or value is not None and not is_axis(value):
        raise TypeError(
            "MoEConfig: ep_axis must be an axis name, a tuple of names, each once, or None; "
            f"got ep_axis={value!r}; write for example ep_axis='ep'"
        )


def _float_dtype(name: str, value: DTypeLike) -> jnp.dtype:
    dtype = as_dtype("MoEConfig", name, value)
    if dtype.name not in _DTYPES[name]:
        raise ValueError(
            f"MoEConfig: {name} must be one of {', '.join(_DTYPES[name])}, a floating dtype; got {name}={dtype.name}; "
            "use jnp.bfloat16 or jnp.float32, and a recipe for 8 bits"
        )
    return dtype

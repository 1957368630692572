"""Time of the block's phases: `--phases`, after the last step, of the first layer on a batch of the run.

    time of a phase = time of a program that ends after it - time of the program that ends before it

The programs are made of `expertmesh.flax_moe.stages` and timed by the host's clock. What the whole step hides, such as
an exchange behind other GEMMs, is not hidden here, and neither `--remat` nor the scan over layers is part of it: phases
say where a block's time goes, not what a step takes.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from expertmesh.flax_moe import stages
from expertmesh.train import model
from expertmesh.train.mesh import microbatches
from expertmesh.train.model import ModelConfig
from expertmesh.train.step import TrainState, key_of_step, params_read

PHASES = ("route", "dispatch", "experts", "combine", "backward")
ROUNDS = 10

Program = Callable[[Any, jax.Array, Any, jax.Array | None], Any]


def time_phases(
    config: ModelConfig, state: TrainState, batch: jax.Array, *, grad_accum: int = 1
) -> dict[str, float]:
    """Milliseconds of each of PHASES, of the first layer's block on a microbatch; medians of ROUNDS calls.

    All processes of a job call it at the same time. A phase that takes less than the clock's noise may be negative.

    Args:
      config: of the model.
      state: of a step.
      batch: int32[B, S + 1], of a step.
      grad_accum: microbatches of a step.
    """
    operands = jax.jit(operands_of, static_argnums=(0, 1))(config, grad_accum, state, batch)
    compiled = [jax.jit(program) for program in programs(config)]
    for program in compiled:
        jax.block_until_ready(program(*operands))
    times: list[list[float]] = [[] for _ in compiled]
    for _ in range(ROUNDS):
        for program, of_program in zip(compiled, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            of_program.append(1e3 * (time.perf_counter() - start))
    return of_ends([statistics.median(of_program) for of_program in times])


def of_ends(ends: list[float]) -> dict[str, float]:
    """Phase -> what its program took beyond the longest before it: noise may be longer than a phase."""
    reached = [0.0, *itertools.accumulate(ends, max)]
    return {
        phase: end - before
        for phase, (before, end) in zip(PHASES, itertools.pairwise(reached), strict=True)
    }


def operands_of(config: ModelConfig, grad_accum: int, state: TrainState, batch: jax.Array) -> Any:
    """(params, x, quant_state, key) of the first layer's block."""
    params = params_read(state)
    bytes_BS = microbatches(batch, grad_accum)[0][:, :-1]
    first_params, first_state = (
        jax.tree.map(lambda leaf: leaf[0], tree)
        for tree in (params["layers"]["moe"], state.quant_state)
    )
    x_BSD = model.first_block_input(params, bytes_BS, config)
    return first_params, x_BSD, first_state, key_of_step(config, 0, 0)


def programs(config: ModelConfig) -> tuple[Program, ...]:
    """One for each of PHASES, which ends after it."""
    moe = config.moe

    def forward(
        end: str, params: Any, x: jax.Array, quant_state: Any, key: jax.Array | None
    ) -> Any:
        routed = stages.route(params, x, moe)
        if end == "route":
            return routed[1:]
        sent = stages.dispatch(params, routed, moe)
        if end == "dispatch":
            # Under a recipe nothing reads the rows where there are quantized ones.
            rows = sent.rows if sent.quantized is None else sent.quantized
            return routed[1:], sent.weights, rows
        computed = stages.experts(params, sent, moe, quant_state=quant_state, key=key)
        return routed[1:], computed[1:] if end == "experts" else stages.combine(computed)

    def backward(params: Any, x: jax.Array, quant_state: Any, key: jax.Array | None) -> Any:
        def combined(params: Any, x: jax.Array) -> Any:
            routed, y = forward("combine", params, x, quant_state, key)
            _, _, aux_loss, z_loss, *rest = routed
            return (y, aux_loss, z_loss), rest

        made, pull, rest = jax.vjp(combined, params, x, has_aux=True)
        return made, rest, pull((made[0], *map(jnp.ones_like, made[1:])))

    return *(functools.partial(forward, end) for end in PHASES[:-1]), backward

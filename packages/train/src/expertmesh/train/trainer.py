"""A model in training: the functions of `step.py` for one model, its options and a mesh, each made once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from expertmesh.core import global_shard_guard
from expertmesh.train import step as steps
from expertmesh.train.mesh import AXES, RESOURCE
from expertmesh.train.model import ModelConfig
from expertmesh.train.options import TrainingOptions
from expertmesh.train.step import EvalStep, Optimizer, SavedState, TrainState, TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """What trains `config` on `mesh` as the options say; all of it is called under `on_mesh`.

    Nothing is compiled before the first call of a step. Batches are int32[B, S + 1], laid out as `rows` says.
    """

    config: ModelConfig
    options: TrainingOptions
    mesh: Mesh

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """The context of the trainer's calls: its mesh, and the roles of the mesh's axes."""
        with jax.set_mesh(self.mesh), global_shard_guard(RESOURCE):
            yield

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        return steps.make_optimizer(self.options)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where the state lives."""
        return steps.state_shardings(
            self.config, self.optimizer, self.mesh, offload=self.options.offload
        )

    @functools.cached_property
    def rows(self) -> NamedSharding:
        """Where a batch lies: its sequences are split over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(AXES, None))

    @functools.cached_property
    def step(self) -> TrainStep:
        """Of `make_train_step`; the state's buffers are reused."""
        return steps.make_train_step(
            self.config,
            self.optimizer,
            self.shardings,
            self.mesh,
            seed=self.options.seed,
            grad_accum=self.options.grad_accum,
        )

    @functools.cached_property
    def evaluate(self) -> EvalStep:
        """Of `make_eval_step`."""
        return steps.make_eval_step(self.config, self.mesh)

    def init(self) -> TrainState:
        """The state before the first step."""
        return steps.init_state(self.config, self.optimizer, self.shardings, self.options.seed)

    def abstract(self) -> TrainState:
        """The state's shapes, dtypes and shardings, without its values."""
        return steps.abstract_state(self.config, self.optimizer, self.shardings)

    def restored(self, saved: SavedState) -> TrainState:
        """The state of a checkpoint."""
        return steps.with_copies(self.config, saved, self.shardings)

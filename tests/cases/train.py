"""Small models in training: a `Trainer`, and batches of random bytes."""

import math

import jax
import numpy as np
from jax.sharding import AxisType

from expertmesh.train.mesh import AXES
from expertmesh.train.options import TrainingOptions
from expertmesh.train.trainer import Trainer


def trainer(config, *, sizes=(2, 4), axis_type=AxisType.Explicit, **options):
    """Of `config` on a mesh of the first devices; `options` are fields of TrainingOptions."""
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(axis_type,) * 2, devices=devices)
    return Trainer(config=config, options=TrainingOptions(**{"steps": 4} | options), mesh=mesh)


def text(number, size):
    """The bytes [B, S + 1] of a batch."""
    return np.random.default_rng(number).integers(0, 256, size).astype(np.int32)


def batch(one, number, size):
    """`text`, where the trainer's batches lie."""
    return jax.device_put(text(number, size), one.rows)


def abstract_batch(one, size):
    return jax.ShapeDtypeStruct(size, np.int32, sharding=one.rows)


def run(one, size, *, state=None, first=1, last, program=None):
    """The state after the steps from `first` to `last`, and the metrics of each; without a state, from the first.

    Steps are those of `one`, or the `program` that was compiled of them.
    """
    found, step = [], program or one.step
    with one.on_mesh():
        state = one.init() if state is None else state
        for number in range(first, last + 1):
            state, metrics = step(state, batch(one, number, size), number)
            found.append(jax.device_get(metrics))
    return state, found

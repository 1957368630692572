"""Checkpoints of models: read from safetensors files straight to device shards, and written.

    files = Checkpoint(folder)
    for i in hf.moe_layers(files.config):
        params, expert_bias = load_sharded(files, files.config, i, shardings)

`python -m expertmesh.convert` converts a whole folder.
"""

from expertmesh.flax_moe.checkpoint.export import export_tensors
from expertmesh.flax_moe.checkpoint.files import Checkpoint, Tensors, write_checkpoint
from expertmesh.flax_moe.checkpoint.load import ShardedLayer, load_sharded

__all__ = [
    "Checkpoint",
    "ShardedLayer",
    "Tensors",
    "export_tensors",
    "load_sharded",
    "write_checkpoint",
]

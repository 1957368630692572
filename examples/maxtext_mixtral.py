"""A tiny Mixtral in MaxText's own training loop, with the experts of this library. Needs MaxText; downloads nothing."""

import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText's word for: no Google Cloud
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there is no GPU

import jax
import maxtext
from maxtext.trainers.pre_train import train

import expertmesh.maxtext

OPTIONS = {
    "run_name": "tiny-mixtral",
    "decoder_block": "mixtral",
    "base_num_decoder_layers": 2,
    "base_emb_dim": 64,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_mlp_dim": 128,
    "base_moe_mlp_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "load_balance_loss_weight": 0.01,
    "vocab_size": 256,
    "max_target_length": 64,
    "per_device_batch_size": 1.0,
    "steps": 5,
    "learning_rate": 1e-2,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "sparse_matmul": False,
    "ici_expert_parallelism": 4,
    "ici_fsdp_parallelism": -1,  # what is left of the devices
    "override_model_config": True,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
}


def main():
    base_yml = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    on_cpu = jax.default_backend() == "cpu"
    folder = pathlib.Path(tempfile.mkdtemp())
    options = OPTIONS | {
        "hardware": "cpu" if on_cpu else "gpu",
        "skip_jax_distributed_system": True,
    }
    options |= {"base_output_directory": folder, "jax_cache_dir": ""}
    options |= {"metrics_file": folder / "metrics"}
    arguments = [f"{name}={value}" for name, value in options.items()]
    with expertmesh.maxtext.installed():  # the one line
        train.main(["", str(base_yml), *arguments, *sys.argv[1:]])
    for row in map(json.loads, (folder / "metrics").read_text().splitlines()):
        balance = row["learning/moe_lb_loss"]
        print(f"step {row['step']:.0f}: loss {row['learning/loss']:.4f}, balance {balance:.4f}")


if __name__ == "__main__":
    main()

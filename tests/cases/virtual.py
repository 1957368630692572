"""Eight virtual CPU devices, for programs of this folder that are no tests."""

import os

import jax

from multiprocess_runner import COMPILE_QUICKLY


def use_virtual_devices() -> None:
    """As tests have them; before anything asks JAX for a device."""
    os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

"""Products in full float32: GPUs would round their factors to TF32."""

import jax
import pytest


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield

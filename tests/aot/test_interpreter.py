"""Bodies of Triton kernels on a CPU, by Triton's interpreter: the tests of few rows that a GPU runs.

Not Hopper's products, which are CUDA C++, nor what writes 8 bits by machine instructions. The interpreter is slow: of
long products a few cases are always run, all of them with `-m full`.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from cases.gpus import OPTION
from cases.marks import needs_triton

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.aot, needs_triton]


def some_or_all(some: tuple[str, int], every: tuple[str, int]):
    """Parameters: which cases and how many, some always, all of them where all is asked for."""
    cases = pytest.param(*some, id="some"), pytest.param(*every, id="all", marks=pytest.mark.full)
    return pytest.mark.parametrize("which, count", cases)


def interpret(tests: list[str], which: str, count: int, *options: str):
    """In a process of its own: Triton reads the variable when it is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "-k",
        which,
        *options,
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{count} passed" in done.stdout


def test_kernels_of_few_rows():
    few = "gathered or not products and not quantization"
    interpret(["tests/core/kernels/test_small.py"], few, 5)


def test_terms_of_low_rank():
    which = "moved or few_plain and (sm_100 or sm_80)"
    interpret(["tests/core/kernels/test_low_rank.py"], which, 12)


WEIGHTS = "weights_for_both_gemms and (square-False or current-False)"


@some_or_all((f"{WEIGHTS} and bfloat16-True", 6), (WEIGHTS, 36))
def test_weights_for_both_gemms(which, count):
    interpret(["tests/core/kernels/test_quantize.py"], which, count)


@some_or_all(("3-1-5-40", 1), ("5-3-1-0 or 3-1-5-40", 2))
def test_plan_of_copies(which, count):
    interpret(["tests/ep/test_copy_plan.py"], which, count)


WITHOUT_BLOCKS = "rows_of_tokens_without_blocks"


@some_or_all((f"{WITHOUT_BLOCKS} and (True-2-True or False-1-False)", 2), (WITHOUT_BLOCKS, 8))
def test_rows_of_tokens_without_blocks(which, count):
    interpret(["tests/core/kernels/test_grouped_quantize.py"], which, count)


def test_kernels_that_take_the_place_of_refused_ones():
    interpret(["tests/core/kernels/test_refused.py"], "grouped_gemms", 3)


def test_amax_of_activations():
    interpret(["tests/core/kernels/test_activate_rows.py"], "amax_of_rows and 200", 3)
    interpret(["tests/core/kernels/test_activate_quantize.py"], "a_scale_per_group", 8)


# GPUs whose kernels read by descriptors, and by pointers; the latter's widen blocks of 32 by machine instructions.
OF_16_BITS = pytest.mark.parametrize("gpu", ["sm_100", "sm_89 and not PTX"])


@OF_16_BITS
def test_products(gpu):
    interpret(["tests/core/kernels/test_grouped_gemm.py"], f"{gpu} and few_rows", 1)


@OF_16_BITS
def test_products_of_gathered_rows(gpu):
    which = f"{gpu} and float16-float32 and 24"
    interpret(["tests/core/kernels/test_gathered_gemm.py"], which, 1)


@pytest.mark.parametrize("gpu, count", [("sm_100", 10), ("sm_89 and not PTX and not 32-", 7)])
def test_products_of_8_bits(gpu, count):
    which = f"{gpu} and 300 and not tokens"
    interpret(["tests/core/kernels/test_quantized_grouped_gemm.py"], which, count)


@pytest.mark.full
@OF_16_BITS
def test_products_of_8_bits_that_are_long_or_of_tokens(gpu):
    which = f"{gpu} and (300 and tokens or long_sum) and not gradient_of_tokens"
    interpret(["tests/core/kernels/test_quantized_grouped_gemm.py"], which, 10)


def test_weight_gradients_of_tokens():
    which = "gradient_of_tokens and sm_89 and not PTX and 90 and float32"
    interpret(["tests/core/kernels/test_quantized_grouped_gemm.py"], which, 2)


@some_or_all(("sm_100 and 90 and not 3000", 2), ("sm_100 and not 3000", 8))
def test_products_of_8_bits_and_a_thin_operand(which, count):
    interpret(["tests/core/kernels/test_mixed_grouped_gemm.py"], which, count)


def test_two_cotangents_of_one_read():
    interpret(["tests/core/kernels/test_grouped_cotangents.py"], "sm_100 and not 3000", 8)


@pytest.mark.full
def test_a_block_with_adapters():
    interpret(["tests/flax_moe/test_lora.py"], "on_a_gpu and 384", 2, OPTION, "sm_100")


def test_products_of_4_bits():
    interpret(["tests/core/kernels/test_packed_grouped_gemm.py"], "packed", 6)


@pytest.mark.parametrize("gpu, count", [("sm_100", 9), ("sm_89 and not PTX and not 32-", 6)])
def test_dense_products_of_8_bits(gpu, count):
    which = f"{gpu} and bfloat16 and not e5m2"
    interpret(["tests/core/kernels/test_quantized_gemm.py"], which, count)

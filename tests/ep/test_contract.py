"""The exchange keeps the contract of expertmesh.core.testing in every kind of setting."""

from cases.contract import contract_tests
from cases.ep import CASES

# Loops and vmap: test_dispatch.py, and the whole block in every mode.
test_covering_array, test_full_product = contract_tests(
    CASES,
    mesh=((1, 1), (2, 4), (8, 1)),
    transform=("jit", "grad", "poison"),
)

"""The block keeps the contract of expertmesh.core.testing in every kind of setting."""

from cases.contract import contract_tests
from cases.flax_moe import CASES

# The block's ops keep the whole contract in their own packages; here the composition is checked.
test_covering_array, test_full_product = contract_tests(
    CASES,
    mesh=((1, 1), (2, 4)),
    layout=("one", "several"),
    transform=("grad", "scan"),
    size=("regular", "odd"),
)

"""The exchange keeps the contract of expertmesh.core.testing in every kind of setting."""

from cases.contract import contract_tests
from cases.ep import CASES

test_covering_array, test_full_product = contract_tests(CASES)

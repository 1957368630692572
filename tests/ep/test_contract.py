"""The exchange keeps the contract of expertmesh.core.testing in every kind of setting."""

import pytest

from cases.ep import CASES
from expertmesh.core.testing import all_settings, check_op, covering_settings

COVER = covering_settings(CASES)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "case, setting", COVER, ids=lambda value: str(getattr(value, "name", value))
)
def test_covering_array(case, setting):
    check_op(case, setting)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_full_product(case):
    for setting in all_settings(case):
        check_op(case, setting)

"""The contract of expertmesh.core.testing as two tests of a module."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from expertmesh.core.testing import OpCase, check_op, covering_settings, full_settings

# The full product of a case is minutes to an hour of one core: this many tests share it.
PARTS = 16


def contract_tests(cases: Sequence[OpCase], **only: tuple) -> tuple[Callable, Callable]:
    """`test_covering_array, test_full_product = contract_tests(CASES)`.

    Args:
      cases: of one package.
      only: factor -> the values that the covering array uses, for cases that are too dear for all of them.
    """
    cover = covering_settings(cases, **only)

    @pytest.mark.any_device
    @pytest.mark.parametrize("case, setting", cover, ids=lambda x: str(getattr(x, "name", x)))
    def covering_array(case, setting):
        check_op(case, setting)

    @pytest.mark.full
    @pytest.mark.parametrize("part", range(PARTS))
    @pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    def full_product(case, part):
        layouts = itertools.groupby(full_settings(case), lambda s: (s.mode, s.mesh, s.layout))
        for _, settings in itertools.islice(layouts, part, None, PARTS):
            for setting in list(settings):
                check_op(case, setting)

    return covering_array, full_product

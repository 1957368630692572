"""Which members of a product `make test` runs; the others run by `-m full`."""

import itertools

import pytest


def covering(names, *factors, covers, indirect=()):
    """parametrize with the product of the factors, whose other members than `covers` run by `-m full`.

    Args:
      names: as in parametrize.
      factors: the values of each name.
      covers: the members that always run; of one factor, its values.
      indirect: as in parametrize.
    """
    covers = [values if len(factors) > 1 else (values,) for values in covers]
    product = list(itertools.product(*factors))
    assert all(values in product for values in covers)
    marks = [() if values in covers else pytest.mark.full for values in product]
    values = [pytest.param(*v, marks=m) for v, m in zip(product, marks, strict=True)]
    return pytest.mark.parametrize(names, values, ids=str, indirect=indirect)


def full(*values):
    """Values that run by `-m full`."""
    return pytest.param(*values, marks=pytest.mark.full)

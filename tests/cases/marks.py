"""Marks of pytest that tests of kernels share."""

import pytest

from expertmesh.core.support import TRITON, distribution_unsupported

MISSING = distribution_unsupported(TRITON) is not None
needs_triton = pytest.mark.skipif(MISSING, reason=f"needs {TRITON}")

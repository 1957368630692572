"""Marks of pytest that tests of kernels share."""

import pytest

from expertmesh.core.support import TRITON, missing_distribution

MISSING = any(map(missing_distribution, TRITON))
needs_triton = pytest.mark.skipif(MISSING, reason=f"needs {' and '.join(TRITON)}")

"""Fixtures of tests that start whole programs."""

import os

import pytest


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Processes that a module's tests start, one after the other, compile what is alike once."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        yield

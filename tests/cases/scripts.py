"""Programs of the repository that are no modules of a package, as modules."""

import importlib.util
import pathlib
import sys
from types import ModuleType
from unittest import mock


def load_script(path: pathlib.Path) -> ModuleType:
    """The program at `path`, run anew; its dataclasses find themselves under a name of its own.

    It finds modules beside it, as when it is run.
    """
    name = f"script_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module

"""python -m expertmesh.core._native: builds `_host` beside the sources if there is none that fits them.

For a tree that is not installed.
"""

from expertmesh.core._native import host
from expertmesh.core._native.build import build, module_path

if __name__ == "__main__":
    found = host()
    if isinstance(found, str):
        build(module_path())
    print(module_path() if isinstance(found, str) else found.__file__)

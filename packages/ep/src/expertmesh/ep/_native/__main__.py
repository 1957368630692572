"""python -m expertmesh.ep._native: builds `_host` beside the sources, for a tree that is not installed."""

from expertmesh.ep._native.build import build, module_path

if __name__ == "__main__":
    build(module_path())
    print(module_path())

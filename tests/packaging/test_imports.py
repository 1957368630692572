"""Arrows report -> train, convert, maxtext -> flax_moe -> ep -> core -> jax, in sources and imported; no circles."""

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGES = pathlib.Path(__file__).resolve().parents[2] / "packages"
# What a package must not name anywhere, not even inside a function.
FORBIDDEN = {
    "core": {"expertmesh.ep", "expertmesh.flax_moe", "expertmesh.train", "flax", "optax", "orbax"},
    "ep": {"expertmesh.flax_moe", "expertmesh.train", "flax", "optax", "orbax"},
    "flax_moe": {"expertmesh.convert", "expertmesh.maxtext", "expertmesh.train", "maxtext"}
    | {"optax", "orbax", "matplotlib", "tqdm"},
    "convert": {"expertmesh.maxtext", "expertmesh.train", "optax", "orbax", "matplotlib", "tqdm"},
    "maxtext": {"expertmesh.convert", "expertmesh.train", "optax", "orbax", "matplotlib", "tqdm"},
    "train": {"expertmesh.maxtext", "expertmesh.report"},
    "report": {"expertmesh.convert", "expertmesh.maxtext", "optax", "orbax", "tqdm"},
}
# What importing a package must not import. Of programs, `--help` and a wrong
# option answer without waiting for JAX.
NOT_LOADED = {
    "core": {"expertmesh.ep", "expertmesh.flax_moe", "flax", "optax", "orbax", "nvidia.nccl"},
    "ep": {"expertmesh.flax_moe", "flax", "optax", "orbax", "nvidia.nccl"},
    "flax_moe": {"expertmesh.train", "nvidia.nccl"},
    "convert": {"jax", "expertmesh.core"},
    "train": {"jax", "expertmesh.core", "optax", "orbax"},
    "report": {"jax", "expertmesh.core", "optax", "orbax"},
}
OPTIONAL = {"triton", "jax_triton", "matplotlib", "tqdm"}
# The distribution that an import package is part of, where it has another name.
DISTRIBUTION = {"convert": "flax_moe", "maxtext": "flax_moe", "report": "train"}
# Modules that are private to a package, and known to all others of it.
PRIVATE_MODULES = {"_jax", "_native"}


def source(package):
    return PACKAGES / DISTRIBUTION.get(package, package) / "src/expertmesh" / package


def imported(tree, package_parts):
    """(line, dotted name) of every import; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def private_attributes(tree):
    """(line, name) of each `sibling._name` where `sibling` was imported from expertmesh."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = getattr(node, "module", None) or ""
            for alias in node.names:
                full = f"{origin}.{alias.name}" if origin else alias.name
                if full.startswith("expertmesh."):
                    aliases[alias.asname or alias.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                if node.value.id in aliases:
                    yield node.lineno, f"{aliases[node.value.id]}.{node.attr}"


# Of others, what they do not document: their private modules and names, and those that move from release to release.
# `core/_jax.py` alone may use such, and says why.
OTHERS = {"jax", "jaxlib", "triton", "jax_triton"}
MOVING = {
    "jax_triton.triton_lib", "triton.experimental", "triton.runtime", "triton.compiler", "triton.backends", "jaxlib",
}  # fmt: skip
VERSIONS = "_jax.py"


def undocumented(path, text):
    if path.name == VERSIONS:
        return
    tree = ast.parse(text)
    chains = ((n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    for line, name in [*imported(tree, []), *chains]:
        root, *rest = name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in rest)
        if root in OTHERS and (private or starts_with(name, MOVING)):
            yield f"{path.name}:{line} uses {name}"


def is_private(name, package):
    """Whether a module of this package must not use it: it is private to another module, or to another package."""
    known = PRIVATE_MODULES if starts_with(name, {f"expertmesh.{package}"}) else set()
    parts = set(name.split(".")) - known
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def starts_with(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def violations(package, path, text):
    parts = ["expertmesh", package, *path.relative_to(source(package)).parent.parts]
    tree = ast.parse(text)
    for line, name in [*imported(tree, parts), *private_attributes(tree)]:
        if starts_with(name, FORBIDDEN[package]):
            yield f"{path.name}:{line} imports {name}"
        elif name.startswith("expertmesh.") and is_private(name, package):
            yield f"{path.name}:{line} uses the private name {name}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_goes_against_the_arrows(package):
    files = sorted(source(package).rglob("*.py"))
    assert files
    assert [v for path in files for v in violations(package, path, path.read_text())] == []


@pytest.mark.parametrize(
    "package, text",
    [
        ("core", "import flax.linen as nn"),
        ("core", "def f():\n    from expertmesh import ep"),
        ("core", "from expertmesh.ep.capacity import rows"),
        ("core", "from ..ep import prepare"),
        ("core", "from expertmesh.core.specs import _cut"),
        ("core", "def f():\n    from expertmesh.core import specs\n    specs._cut(1)"),
        ("core", "from expertmesh.core.op import Op\nOp._cut"),
        ("ep", "from expertmesh.flax_moe import moe"),
        ("ep", "from expertmesh.core import _jax"),
        ("ep", "from expertmesh.core._jax import varying_axes"),
        ("ep", "from expertmesh.core import specs\nspecs._cut(1)"),
        ("flax_moe", "from expertmesh.ep.dispatch import _combine"),
        ("flax_moe", "def f():\n    from expertmesh.train import step"),
        ("flax_moe", "import optax"),
        ("train", "from expertmesh.flax_moe.moe import _routed"),
    ],
)
def test_such_an_import_is_found(package, text):
    assert list(violations(package, source(package) / "planted.py", text))


def module_texts() -> dict[str, str]:
    """Every module's source, by its dotted name."""
    texts = {}
    for root in (source(package).parents[1] for package in FORBIDDEN):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            texts[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path.read_text()
    return texts


def arrows(texts: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each imports, inside of functions too."""

    def module_of(name):
        while name and name not in texts:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {module_of(name) for _, name in imported(ast.parse(text), [])} - {"", module}
        for module, text in texts.items()
    }


def test_no_imports_go_in_circles():
    graphlib.TopologicalSorter(arrows(module_texts())).prepare()


def test_a_circle_is_found():
    texts = module_texts() | {
        "expertmesh.core.specs": "def f():\n    from expertmesh.core import op"
    }
    with pytest.raises(graphlib.CycleError, match="expertmesh.core.specs"):
        graphlib.TopologicalSorter(arrows(texts)).prepare()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_undocumented_names_are_used_in_one_file(package):
    files = sorted(source(package).rglob("*.py"))
    assert [v for path in files for v in undocumented(path, path.read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        "from jax._src import core",
        "import jaxlib",
        "from triton.experimental import gluon",
        "from jax_triton.triton_lib import get_type_id",
        "def f():\n    from triton.runtime.cache import get_cache_manager",
        "import triton\ntriton.backends.nvidia",
        "import jax\njax.interpreters._private()",
    ],
)
def test_such_a_name_is_found(text):
    assert list(undocumented(source("core") / "planted.py", text))


@pytest.mark.parametrize("package", NOT_LOADED)
def test_importing_loads_nothing_optional(package):
    """The optional packages are hidden, so the import would fail where it needs one."""
    code = f"""
import sys
for name in {sorted(OPTIONAL)}:
    sys.modules[name] = None
import expertmesh.{package}
loaded = [n for n in {sorted(NOT_LOADED[package])} if n in sys.modules]
assert not loaded, loaded
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_importing_touches_no_device():
    """With a platform that does not exist, any use of a device fails."""
    code = "import expertmesh.core, expertmesh.ep, expertmesh.flax_moe, expertmesh.train.job"
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr

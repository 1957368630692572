"""The four distributions: one namespace, one wheel each, each complete by itself."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from expertmesh.ep import _native

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ["core", "ep", "flax_moe", "train"]
# The import packages of each; `expertmesh.convert` is a program of flax_moe, `expertmesh.maxtext` its block in
# MaxText, `expertmesh.report` a program of train.
OWNED = {package: {package} for package in PACKAGES} | {
    "flax_moe": {"flax_moe", "convert", "maxtext"},
    "train": {"train", "report"},
}
NEEDS = {package: PACKAGES[: i + 1] for i, package in enumerate(PACKAGES)}
TRAINING = {"optax", "orbax-checkpoint", "matplotlib", "tqdm"}
REPOSITORY = re.search(r"^repository-code: \"(.*)\"$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
NAMES = {package: f"expertmesh-{package.replace('_', '-')}" for package in PACKAGES}


def version(package):
    """The literal __version__, without an import."""
    folder = ROOT / "packages" / package / "src/expertmesh" / package
    path = next(p for name in ("version", "__init__") if (p := folder / f"{name}.py").exists())
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __version__")


def test_the_namespace_has_no_init():
    """One expertmesh/__init__.py would hide the other packages."""
    assert list(ROOT.glob("packages/**/expertmesh/__init__.py")) == []
    assert list(ROOT.glob("tests/**/expertmesh/__init__.py")) == []
    for package in PACKAGES:
        folder = ROOT / "packages" / package / "src/expertmesh"
        assert {p.name for p in folder.iterdir() if p.name != "__pycache__"} == OWNED[package]
        assert all((folder / name / "py.typed").exists() for name in OWNED[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_the_changelog_names_the_version(package):
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version(package))}\b", text, re.MULTILINE)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A PATH with a g++ that hands over the extension which this environment has, if it has one: compiled once."""
    folder, host = tmp_path_factory.mktemp("bin"), _native.host()
    if not isinstance(host, str):
        copy = f'#!/bin/sh\nfor last; do :; done\n/bin/cp {host.__file__} "$last"\n'
        (folder / "g++").write_text(copy)
        (folder / "g++").chmod(0o755)
    return folder


def build(package, folder, path):
    """Its wheel in `folder`, built from a copy, so that the sources stay clean."""
    copy = folder / "source" / package
    ignore = shutil.ignore_patterns("*.egg-info", "*.so", "build", "__pycache__")
    shutil.copytree(ROOT / "packages" / package, copy, ignore=ignore)
    here = ("--no-build-isolation", "--python", sys.executable)
    uv("build", "--wheel", *here, "-o", folder, copy, PATH=str(path))
    return next(folder.glob(f"expertmesh_{package}-*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, compiler):
    """{package: path of its wheel}."""
    folder = tmp_path_factory.mktemp("wheels")
    return {package: build(package, folder, compiler) for package in PACKAGES}


def uv(*arguments, **variables):
    command = [sys.executable, "-m", "uv", *map(str, arguments), "--offline", "--no-config"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")} | variables
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return importlib.metadata.PathDistribution(zipfile.Path(archive, name).parent).metadata


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel(wheels, package):
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()
        (license,) = [n for n in names if n.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(license) == (ROOT / "LICENSE").read_bytes()
    own = tuple(f"expertmesh/{name}/" for name in OWNED[package])
    assert all(n.startswith(own) or ".dist-info/" in n for n in names), names
    sources = ROOT / "packages" / package / "src"
    kinds = {".py", ".typed", ".cc", ".cu", ".cuh", ".h"}
    expected = {str(p.relative_to(sources)) for p in sources.rglob("*") if p.suffix in kinds}
    assert {n for n in names if n.startswith(own)} >= expected
    found = metadata(wheels[package])
    assert found["Name"] == NAMES[package]
    assert found["Version"] == version(package)
    assert found["Requires-Python"] == ">=3.12"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"] == "The expertmesh authors"
    assert set(found.get_all("Project-URL")) == {
        f"Repository, {REPOSITORY}",
        f"Documentation, {REPOSITORY}/tree/main/docs",
        f"Changelog, {REPOSITORY}/blob/main/packages/{package}/CHANGELOG.md",
        f"Issues, {REPOSITORY}/issues",
    }
    extras = set(found.get_all("Provides-Extra"))
    assert extras == {"cuda12", "cuda13"}
    needs = [Requirement(text) for text in found.get_all("Requires-Dist")]
    siblings = [need for need in needs if need.name.startswith("expertmesh")]
    assert all(str(need.specifier) == "<0.2,>=0.1" for need in siblings), siblings
    plain = {need.name for need in needs if not need.marker}
    assert {name for name in plain if name.startswith("expertmesh")} == {
        NAMES[p] for p in NEEDS[package] if p != package
    }
    assert ("flax" in plain) == (package == "flax_moe")
    assert not plain & {"triton", "jax-triton"}
    assert plain & TRAINING == (TRAINING if package == "train" else set())


def test_the_extension_is_in_the_wheel_of_one_python(wheels):
    if isinstance(_native.host(), str):
        pytest.skip(_native.host())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.search(rf"-{python}-{python}-linux_\w+\.whl$", wheels["ep"].name)
    with zipfile.ZipFile(wheels["ep"]) as archive:
        found = [n for n in archive.namelist() if n.endswith(".so")]
    assert found == [f"expertmesh/ep/_native/_host{sysconfig.get_config_var('EXT_SUFFIX')}"]


def test_without_a_compiler_the_wheel_is_pure(tmp_path):
    wheel = build("ep", tmp_path, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize(
    "package", [p for p in PACKAGES if (ROOT / f"packages/{p}/setup.py").exists()]
)
def test_the_build_needs_the_oldest_jaxlib(package):
    """XLA refuses handlers that were built on headers newer than its own."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    (jax,) = (Requirement(x) for x in project["project"]["dependencies"] if x.startswith("jax"))
    (jaxlib,) = (x for x in project["build-system"]["requires"] if x.startswith("jaxlib"))
    (least,) = (each.version for each in jax.specifier if each.operator == ">=")
    assert jaxlib == f"jaxlib=={least}"


def test_extensions_are_built_alike():
    """No package can be imported where another is built, so each has the text of its own."""
    paths = sorted(ROOT.glob("packages/*/src/expertmesh/*/_native/build.py"))
    texts = {path.read_text().partition("# From here on")[2] for path in paths}
    assert len(paths) == 2 and len(texts) == 1 and all(texts)


def test_root_is_not_published():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert root["tool"]["uv"]["package"] is False
    assert "build-system" not in root


@pytest.mark.parametrize("package", PACKAGES)
def test_install_alone(wheels, package, tmp_path):
    """A clean venv gets the wheel, its siblings' wheels and the declared dependencies, no more."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    python = tmp_path / "v/bin/python"
    needed = NEEDS[package]
    uv("pip", "install", "--python", python, "--no-deps", *(wheels[p] for p in needed))
    (site,) = (tmp_path / "v/lib").glob("python*/site-packages")
    requirements = [
        Requirement(text) for p in needed for text in metadata(wheels[p]).get_all("Requires-Dist")
    ]
    link_distributions([r for r in requirements if r.name not in NAMES.values()], site)
    absent = [f"expertmesh.{p}" for p in PACKAGES if p not in needed]
    absent += [] if "flax_moe" in needed else ["flax"]
    code = f"""
import importlib.util, pathlib
import expertmesh.{package} as package
assert pathlib.Path(package.__file__).is_relative_to({str(tmp_path)!r}), package.__file__
assert package.__version__ == {version(package)!r}
found = [name for name in {absent} if importlib.util.find_spec(name)]
assert not found, found
if {"ep" in needed and not isinstance(_native.host(), str)}:
    from expertmesh.ep import _native
    assert not isinstance(_native.host(), str), _native.host()
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr


def link_distributions(requirements, site):
    """Links what the requirements need, to any depth, from this environment into `site`."""
    seen = set()
    while requirements:
        requirement = requirements.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        wanted = not requirement.marker or requirement.marker.evaluate({"extra": ""})
        if key in seen or not wanted:
            continue
        seen.add(key)
        found = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), requirement
        for text in found.requires or []:
            need = Requirement(text)
            extras = requirement.extras or {""}
            if not need.marker or any(need.marker.evaluate({"extra": e}) for e in extras):
                need.marker = None
                requirements.append(need)
        for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))

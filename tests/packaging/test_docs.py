"""The docs name what exists."""

import dataclasses
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from expertmesh.flax_moe import MoEConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
REFERENCE = re.compile(r"\{py:\w+\}`~?(expertmesh[\w.]*)`")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or an attribute of one."""
    module, found = name, []
    while module:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            found.insert(0, attribute)
            continue
        for attribute in found:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_resolve(page):
    names = set(REFERENCE.findall(page.read_text()))
    assert not [name for name in sorted(names) if not resolves(name)]


def test_what_does_not_exist_does_not_resolve():
    assert resolves("expertmesh.core.route") and resolves("expertmesh.core")
    assert not resolves("expertmesh.core.no_such_name") and not resolves("expertmesh.nothing")


def test_the_migration_page_names_options_of_the_block():
    page = (ROOT / "docs/migrating-from-transformer-engine.md").read_text()
    table = page.partition("## Options of the block")[2].partition("\n## ")[0]
    right = " ".join(row.split("|")[2] for row in table.splitlines() if row.count("|") == 3)
    named = set(re.findall(r"`([a-z_]+)`", right)) - {"logical_axes"}  # of the modules
    fields = {field.name for field in dataclasses.fields(MoEConfig)}
    assert len(named) >= 8 and named <= fields, named - fields


def test_the_performance_page_is_made_from_the_results():
    command = [sys.executable, ROOT / "docs/performance.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/performance.py`"


def test_the_figures_of_the_exchange_are_made_from_the_results():
    command = [sys.executable, ROOT / "docs/exchange.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run `python docs/exchange.py`"

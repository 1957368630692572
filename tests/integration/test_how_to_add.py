"""The pages of docs/how-to-add: in a copy of the tree their diffs apply, and the tests that they name pass."""

import pathlib
import re
import shlex
import subprocess

import pytest

import planting

pytestmark = pytest.mark.default_jax

PAGES = sorted((planting.ROOT / "docs/how-to-add").glob("*.md"))


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def tree(tmp_path):
    planting.copy_tree(tmp_path)
    return tmp_path


def apply(tree: pathlib.Path, diff: str) -> None:
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    applied = subprocess.run(command, cwd=tree, input=diff, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr


def test_there_are_pages():
    assert [page.stem for page in PAGES] == ["activation", "family", "format", "transport"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_adds_works(page, tree):
    (program,) = blocks(page, "sh")
    pytest_, *arguments = shlex.split(program)
    assert pytest_ == "pytest" and planting.uses_copy(tree)
    for diff in blocks(page, "diff"):
        apply(tree, diff)
    status, output = planting.run_tests(tree, arguments, seconds=300)
    assert status == planting.GREEN, output

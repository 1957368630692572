"""What crosses devices, of every op and layer: programs are as in the table of census.py, which values cannot show.

Among it F-05, that of a GEMM only the weight is gathered, and of test 20 that the weight of a grouped GEMM is gathered
over fsdp alone.
"""

import pytest

import census
from cases.census import Row, covering_rows, rows_of, subjects

TABLE = census.read(census.TABLE.read_text())
pytestmark = pytest.mark.skipif(
    census.VERSION not in TABLE, reason=f"the table is not of jax {census.VERSION}"
)
AGAIN = "run `make census`, under each version of JAX, if the new bytes are meant"


def check(rows: list[Row]) -> None:
    lines = census.differences(TABLE, rows)
    assert not lines, "\n".join([f"not as in {census.TABLE.name}; {AGAIN}", *lines])


@pytest.mark.parametrize(
    "row", covering_rows(), ids=lambda row: "-".join(row.key).replace(" ", "_")
)
def test_a_row_of_each(row):
    check([row])


@pytest.mark.full
@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_all_rows(subject):
    check(rows_of(subject))


@pytest.mark.default_jax
def test_the_table_has_these_rows():
    """None that is gone, none that is missing, each once, of each version."""
    keys = [row.key for subject in subjects() for row in rows_of(subject)]
    assert len(set(keys)) == len(keys)
    assert all(set(rows) == set(keys) for rows in TABLE.values())


@pytest.mark.default_jax
def test_the_file_is_as_written():
    assert census.written(TABLE) == census.TABLE.read_text()


@pytest.mark.default_jax
def test_a_row_of_one_version_says_so():
    key = ("op", "layout", "forward")
    one = {(*key, "explicit"): "nothing", (*key, "resource"): "nothing"}
    table = {"0.11": one, "0.12": one | {(*key, "resource"): "all-gather"}}
    text = census.written(table)
    assert text.splitlines() == [
        "jax 0.11, 0.12",
        "op | layout | forward | explicit, resource/0.11 | nothing",
        "op | layout | forward | resource/0.12 | all-gather",
    ]
    assert census.read(text) == table
    # What this version gives anew is taken for the others' too, unless they have said otherwise.
    new = one | {(*key, "auto"): "all-reduce"}
    other = census.renewed({"of another": table["0.12"]}, new)["of another"]
    assert other == new | {(*key, "resource"): "all-gather"}

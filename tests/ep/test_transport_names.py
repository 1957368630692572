"""What the names of transports say."""

import pytest

from expertmesh.ep.config import TRANSPORTS
from expertmesh.ep.transports.names import Name, parse


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_base_alone(name):
    inside = (
        "auto" if name == "two_level" else None
    )  # what it takes inside a host if no other is named
    assert parse(name) == Name(name, inside=inside)
    assert parse(f"two_level:{name}").is_two_level == (name != "two_level")


@pytest.mark.parametrize(
    "name, parts",
    [
        ("nvlink:2", Name("nvlink", sms=2)),
        ("nvlink:132", Name("nvlink", sms=132)),
        ("two_level:ring", Name("two_level", inside="ring")),
        ("two_level:nvlink:48", Name("two_level", inside="nvlink:48")),
    ],
)
def test_what_follows_the_colon(name, parts):
    assert parse(name) == parts


@pytest.mark.parametrize(
    "name",
    ["", "nvlink:", "nvlink:0", "nvlink:1", "nvlink:048", "nvlink:4 ", "nvlink:two", "ring:48"]
    + ["two_level:", "two_level:two_level", "two_level:two_level:ring"],
)
def test_what_has_no_such_form_is_no_transport(name):
    assert parse(name) == Name(name) and name not in TRANSPORTS


@pytest.mark.parametrize(
    "name, adds, chooses",
    [
        ("ring", True, False),
        (
            "two_level:ring",
            False,
            False,
        ),  # its sums leave a host as the wire says: test_two_level.py
        ("auto", False, True),
        ("two_level", False, True),
        ("two_level:auto", False, True),
        ("two_level:nvlink:48", False, False),
        ("all_to_all", False, False),
    ],
)
def test_what_depends_on_a_name(name, adds, chooses):
    assert (parse(name).adds_on_the_way, parse(name).chooses) == (adds, chooses)

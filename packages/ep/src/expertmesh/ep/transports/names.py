"""What the name of a transport says.

It is "auto", or a base in `BY_NAME`; "nvlink:" and the most SMs, 2 or more; "two_level:" and the name of the transport
inside a host, which is no "two_level".
"""

import re
from typing import NamedTuple

TWO_LEVEL = "two_level"
_SMS = re.compile(r"[2-9]|[1-9]\d+")


class Name(NamedTuple):
    """The parts of a name.

    Attributes:
      base: "auto" or one of `BY_NAME`; any other where the name is none.
      sms: streaming multiprocessors of "nvlink" at most; None: all that it takes by itself.
      inside: the name of the transport inside a host, of "two_level" alone.
    """

    base: str
    sms: int | None = None
    inside: str | None = None

    @property
    def is_two_level(self) -> bool:
        """Whether it goes between hosts, then inside them."""
        return self.base == TWO_LEVEL

    @property
    def chooses(self) -> bool:
        """Whether it leaves a choice, for all or inside a host, to what is known of the GPUs."""
        return "auto" in (self.base, self.inside)

    @property
    def adds_on_the_way(self) -> bool:
        """Whether sums of ranks do not travel as such, so that they have no wire format.

        "two_level:ring" has one: its sums leave a host as the wire says. Inside the host quantized ones are added on
        the way; those of a dtype, which each rank rounds, are moved by "all_to_all".
        """
        return self.base == "ring"


def parse(name: str) -> Name:
    """The parts of a name; what has no such form is all base, and no transport's."""
    base, _, detail = name.partition(":")
    if base == "nvlink" and _SMS.fullmatch(detail):
        return Name(base, sms=int(detail))
    if name == TWO_LEVEL:
        return Name(base, inside="auto")
    if base == TWO_LEVEL and detail and not parse(detail).is_two_level:
        return Name(base, inside=detail)
    return Name(name)

"""The tests' short name for expertmesh.core.hlo."""

from expertmesh.core.hlo import Collective, axes_of, collectives, count

__all__ = ["Collective", "axes_of", "collectives", "count"]

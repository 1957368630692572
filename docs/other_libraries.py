"""What the documentation of JAX and Flax calls their types, which are defined elsewhere in them."""

import flax.linen
import jax.sharding
from jax.typing import ArrayLike, DTypeLike
from sphinx.util.typing import stringify_annotation

# The documented name of a type, by where it is defined.
DOCUMENTED = {
    f"{found.__module__}.{found.__qualname__}": name
    for name, found in {
        "jax.sharding.Mesh": jax.sharding.Mesh,
        "jax.sharding.PartitionSpec": jax.sharding.PartitionSpec,
        "jax.sharding.Sharding": jax.sharding.Sharding,
        "flax.linen.Module": flax.linen.Module,
    }.items()
}
_UNIONS = {
    stringify_annotation(union, "smart"): f"~jax.typing.{name}"
    for name, union in {"ArrayLike": ArrayLike, "DTypeLike": DTypeLike}.items()
}


def named_unions(signature: str) -> str:
    """A signature with the names of JAX's unions in place of their members."""
    for members, name in _UNIONS.items():
        signature = signature.replace(members, name)
    return signature

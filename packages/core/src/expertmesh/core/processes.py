"""What the processes of a job tell each other by JAX's coordination service, in which no device takes part."""

import time

import jax

from expertmesh.core import _jax

__all__ = ["gather_texts", "say", "texts_of_all"]


def gather_texts(name: str, text: str, *, timeout: float) -> list[str | None]:
    """What each process says under a name.

    Args:
      name: the same in all processes, which call this equally often under it.
      text: what this process says.
      timeout: seconds that it waits for the others.

    Returns:
      One text for each process, in their order; None for one that has said nothing in time. In a job of one process its
      text alone.
    """
    store = _jax.coordination_service()
    if store is None:
        return [text]
    folders = [f"expertmesh/{name}/{process}/" for process in range(jax.process_count())]
    own = folders[jax.process_index()]
    number = len(store.key_value_dir_get(own))  # of this call, under this name
    store.key_value_set(f"{own}{number}", text)
    end = time.monotonic() + timeout
    return [_read(store, f"{folder}{number}", end) for folder in folders]


def say(name: str, text: str) -> None:
    """What this process says under a name from now on; nothing in a job of one process."""
    if store := _jax.coordination_service():
        store.key_value_set(_key(name, jax.process_index()), text, allow_overwrite=True)


def texts_of_all(name: str) -> list[str | None]:
    """What each process said last under a name; None for one that never did, and in a job of one process."""
    store = _jax.coordination_service()
    if store is None:
        return [None]
    said = dict(store.key_value_dir_get(f"expertmesh/{name}/"))
    return [said.get(_key(name, process)) for process in range(jax.process_count())]


def _key(name: str, process: int) -> str:
    return f"expertmesh/{name}/{process}"


def _read(store: _jax.Store, key: str, end: float) -> str | None:
    left = max(1, round(1000 * (end - time.monotonic())))
    try:
        return store.blocking_key_value_get(key, left)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None

"""The fields of a model's config, as `config.json` has them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Fields", "get", "must", "name_of", "number", "of_text", "step"]

Fields = Mapping[str, Any]


def name_of(fields: Fields) -> str:
    """The model's type, for messages."""
    return str(fields.get("model_type"))


def of_text(fields: Fields) -> Fields:
    """The config of the text model, where it lies in `text_config` of a model of several; else the config."""
    inner = fields.get("text_config")
    return inner if isinstance(inner, Mapping) and "model_type" in inner else fields


def get(fields: Fields, *keys: str) -> Any:
    """The value of the first of these keys that is there.

    Raises:
      ValueError: none of them is there.
    """
    for key in keys:
        if fields.get(key) is not None:
            return fields[key]
    raise ValueError(
        f"hf: the config of a {name_of(fields)} must have {' or '.join(keys)}; got {', '.join(fields)}; "
        "pass the dict of config.json"
    )


def number(fields: Fields, *keys: str) -> int:
    """`get` of a size; of a list with a number for each layer the one that all of them have.

    Raises:
      ValueError: none of the keys is there, layers differ, or it is no int.
    """
    value, name = get(fields, *keys), f"{' or '.join(keys)} of a {name_of(fields)}"
    values = value if isinstance(value, list) else [value]
    if len(set(map(str, values))) != 1:
        raise ValueError(
            f"hf: {name} must be the same in all layers; got {value}; MoEConfig is of all layers: make one for each "
            "kind of layer"
        )
    first = values[0]
    if not isinstance(first, int) or isinstance(first, bool):
        raise ValueError(f"hf: {name} must be an int; got {first!r}; pass the dict of config.json")
    return first


def step(fields: Fields, key: str) -> int:
    """Of how many layers one has a block; 1 where nothing is said.

    Raises:
      ValueError: below 1, or no int.
    """
    every = 1 if fields.get(key) is None else number(fields, key)
    if every < 1:
        raise ValueError(
            f"hf: {key} of a {name_of(fields)} must be at least 1; got {every}; pass the dict of config.json"
        )
    return every


def must(
    fields: Fields, key: str, *wanted: object, why: str = "MoEConfig has no such router"
) -> None:
    """Raises ValueError where a field is there and has none of these values: the block cannot express another."""
    value = fields.get(key)
    if value is not None and value not in wanted:
        raise ValueError(
            f"hf: {key} of a {name_of(fields)} must be {' or '.join(map(repr, wanted))}; got {key}={value!r}; {why}"
        )

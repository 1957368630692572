"""The fields of a model's config, as `config.json` has them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Fields", "get", "must", "name_of", "of_text"]

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


def must(
    fields: Fields, key: str, wanted: object, why: str = "MoEConfig has no such router"
) -> None:
    """Raises ValueError where a field is there and has another value, which the block cannot express."""
    value = fields.get(key, wanted)
    if value != wanted:
        raise ValueError(
            f"hf: {key} of a {name_of(fields)} must be {wanted!r}; got {key}={value!r}; {why}"
        )

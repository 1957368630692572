"""The fields of a model's config, as `config.json` has them."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "Fields",
    "count",
    "entries",
    "get",
    "inner",
    "must",
    "name_of",
    "number",
    "of_text",
    "real",
    "step",
]

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
    value, name = get(fields, *keys), " or ".join(keys)
    values = value if isinstance(value, list) else [value]
    if len(set(map(str, values))) != 1:
        raise ValueError(
            f"hf: {name} of a {name_of(fields)} must be the same in all layers; got {value}; MoEConfig is of all "
            "layers: make one for each kind of layer"
        )
    first = values[0]
    if not isinstance(first, int) or isinstance(first, bool):
        raise _refusal(fields, name, "an int", first)
    return first


def count(fields: Fields, *keys: str) -> int:
    """`number`, of at least 1.

    Raises:
      ValueError: see `number`; or it is below 1.
    """
    found = number(fields, *keys)
    if found < 1:
        raise _refusal(fields, " or ".join(keys), "at least 1", found)
    return found


def real(fields: Fields, key: str) -> float:
    """`get` of a float, which may be written as an int.

    Raises:
      ValueError: it is not there, or no number.
    """
    value = get(fields, key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refusal(fields, key, "a number", value)
    return float(value)


def entries(fields: Fields, key: str, kind: type) -> Sequence[Any]:
    """A list; () where nothing is said.

    Raises:
      ValueError: no list, or with an entry of another type than `kind`.
    """
    value = () if fields.get(key) is None else fields[key]
    if not isinstance(value, list | tuple) or not all(isinstance(each, kind) for each in value):
        raise _refusal(fields, key, f"a list of {kind.__name__}", value)
    return value


def inner(fields: Fields, key: str) -> Fields:
    """A config in a config; {} where there is none.

    Raises:
      ValueError: it is no mapping.
    """
    value = {} if fields.get(key) is None else fields[key]
    if not isinstance(value, Mapping):
        raise _refusal(fields, key, "a mapping", value)
    return value


def step(fields: Fields, key: str) -> int:
    """Of how many layers one has a block; 1 where nothing is said.

    Raises:
      ValueError: below 1, or no int.
    """
    return 1 if fields.get(key) is None else count(fields, key)


def must(
    fields: Fields, key: str, *wanted: object, why: str = "MoEConfig has no such router"
) -> None:
    """Raises ValueError where a field is there and has none of these values: the block cannot express another."""
    value = fields.get(key)
    if value is not None and value not in wanted:
        raise ValueError(
            f"hf: {key} of a {name_of(fields)} must be {' or '.join(map(repr, wanted))}; got {key}={value!r}; {why}"
        )


def _refusal(fields: Fields, name: str, rule: str, value: object) -> ValueError:
    return ValueError(
        f"hf: {name} of a {name_of(fields)} must be {rule}; got {value!r:.80}; pass the dict of config.json"
    )

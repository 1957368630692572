"""The base of every config of the library: a value that JSON can hold.

type(config).from_dict(config.to_dict()) == config
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from expertmesh.core.operands import check_type

__all__ = ["Config", "field_names"]


class Config:
    """Base of frozen dataclasses of options. Their `__post_init__` calls `_normalize` first."""

    def _normalize(self) -> None:
        """Makes Python's of NumPy's numbers, so that equal configs are one value to the type as well.

        Raises:
          TypeError: a field is declared `bool`, and its value is none: each text is true, "false" too.
        """
        cls: Any = type(self)
        for field in dataclasses.fields(cls):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                value = value.item()
                object.__setattr__(self, field.name, value)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise TypeError(
                    f"{cls.__name__}: {field.name} must be True or False; got {field.name}={value!r}; "
                    "pass a bool"
                )

    @classmethod
    def check(cls, function: str, **given: object) -> None:
        """Raises TypeError, which names `function`, unless each argument is such a config."""
        name = cls.__name__
        check_type(function, cls, f"pass {name}(...), or {name}.from_dict(...) of a dict", **given)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name, of JSON's types: dtypes by name, tuples as lists, values with fields as dicts."""
        return {name: _encoded(getattr(self, name)) for name in field_names(type(self))}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config of such a dict; fields that it lacks have their defaults.

        Raises:
          ValueError: a key that is no field, or what the constructor refuses.
          TypeError: no mapping, or what the constructor refuses.
        """
        _check_keys(cls, fields)
        return cls(**{name: _decoded(value) for name, value in fields.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config of the text of `to_json`; errors are those of `from_dict`, and of `json.loads`."""
        return cls.from_dict(json.loads(text))


def field_names(cls: Any) -> tuple[str, ...]:
    """Of a dataclass, in their order."""
    return tuple(field.name for field in dataclasses.fields(cls))


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.dtype):
        return value.name
    return value.to_dict() if hasattr(value, "to_dict") else value


def _decoded(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_keys(cls: type, fields: object) -> None:
    name = f"{cls.__name__}.from_dict"
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"{name}: fields must be a mapping; got {type(fields).__name__}; pass the result of to_dict"
        )
    known = field_names(cls)
    if unknown := [key for key in fields if key not in known]:
        raise ValueError(
            f"{name}: keys must be of {', '.join(known)}; got also {', '.join(map(str, unknown))}; "
            "remove or rename them"
        )

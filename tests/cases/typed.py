"""Public functions whose arguments are of the library's types: configs, and what another function made."""

import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping

import pytest


def functions_of(module: types.ModuleType, kinds: Collection[type]) -> Iterator[str]:
    """Those of `__all__` that have such an argument."""
    for name in module.__all__:
        function = getattr(module, name)
        if inspect.isfunction(function) and _arguments(function, kinds):
            yield name


def refuses_others(function, instances: Mapping[type, object]) -> None:
    """Asserts that each such argument, given as None, and as a dict, is refused by its name, before all others."""
    arguments = _arguments(function, instances)
    for other, said in ((None, "None"), ({}, "dict")):
        given = dict.fromkeys(inspect.signature(function).parameters, None) | dict.fromkeys(
            arguments, other
        )
        left = dict(arguments)
        while left:
            with pytest.raises(TypeError, match=f"must be of type .*; got {said}; pass") as caught:
                function(**given)
            named = re.match(r"[\w.]+: (\w+) must be of type (\w+);", str(caught.value))
            assert named and left[named[1]].__name__ == named[2], str(caught.value)
            given[named[1]] = instances[left.pop(named[1])]


def _arguments(function, kinds: Collection[type]) -> dict[str, type]:
    signature = inspect.signature(function)
    return {
        name: argument.annotation
        for name, argument in signature.parameters.items()
        if argument.annotation in kinds
    }

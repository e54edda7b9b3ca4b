"""The models of a script, and whose a module is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model as the recorder saw it.

    Attributes:
        name: its variable; where none was in sight, its class; with a number after it where that is taken. No two
            models have the same.
        cls: name of its class.
        prefix: what names of its modules begin with, before a dot; empty where they stand bare.
        variable: whether the name is that of a variable.
        parameters: how many numbers its parameters have; None where that was not known.
    """

    name: str
    cls: str
    prefix: str
    variable: bool
    parameters: int | None

    def __str__(self) -> str:
        return f"`{self.name}`" + ("" if self.name == self.cls else f" ({self.cls})")

    def has(self, path: str) -> bool:
        """Whether a name of a module begins with the prefix."""
        return not self.prefix or path == self.prefix or path.startswith(f"{self.prefix}.")

    def relative(self, path: str) -> str:
        """A module by the model's own ``named_modules()``."""
        return path[len(self.prefix):].removeprefix(".")


def as_facts(models: Iterable[Model]) -> list[dict[str, Any]]:
    """As they stand among the facts of a run, and in a plan file."""
    return [{"name": one.name, "class": one.cls, "prefix": one.prefix, "variable": one.variable,
             "parameters": one.parameters} for one in models]


def models(facts: Mapping[str, Any]) -> list[Model]:
    """Of facts; none where they do not tell, as those of older recordings."""
    return [Model(one["name"], one["class"], one["prefix"], one["variable"], one["parameters"])
            for one in facts.get("models") or ()]


def model_of(path: str, among: Sequence[Model]) -> Model | None:
    """Whose a module is; None where that is not known."""
    return max((one for one in among if one.has(path)), key=lambda one: len(one.prefix), default=None)

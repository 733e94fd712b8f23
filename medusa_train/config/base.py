"""What every configuration class shares: how keys are declared and which sets of values exclude each other.

Knows no key of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

Self = TypeVar("Self", bound="Config")


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a key: its default (`...` where it has to be given), its meaning in one line, its limits."""
    return Field(default, description=meaning, **limits)


@dataclass(frozen=True)
class Impossible:
    """Values of several keys that cannot hold together.

    It is looked at only when each of `keys` has a usable value of its own, so it can be reported beside the
    mistakes in other keys.

    Attributes:
        keys: the keys it reads; the first one that the user set is where the problem is shown.
        when: true for the impossible values. It may read only `keys`.
        why: what is wrong and what to do.
    """

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str


class Config(BaseModel):
    """A set of flat keys. `load.load_config` reads one and reports every problem of it together.

    Built by hand (in tests), it checks each value by itself; combinations are checked by `load_config`.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    #: Keys accepted from YAMLs of other trainers, without a meaning here.
    foreign: ClassVar[frozenset[str]] = frozenset()
    impossible: ClassVar[tuple[Impossible, ...]] = ()

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _places: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that the user set and that change nothing here; commands print them in one line."""
        return self._ignored

    def origin(self, name: str) -> tuple[str, ...]:
        """Where the value of a key was set: places in files, overrides, flags; empty where nobody set it."""
        return self._places.get(name, ())

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Keys that change nothing beside the values of the others, whatever they hold; a dump leaves them out."""
        return ()

    def resolved(self: Self) -> Self:
        """This configuration with the values filled in that follow from other keys."""
        return self

"""Declare keys: what each affects or belongs to, and the classes that hold them.

`Section` is the base class of everything that has keys. `Config`, the configuration of a command,
adds the values that follow from other keys, and the rules between keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from medusa_train.config.yaml_source import Source

Self = TypeVar("Self", bound="Config")


class Mark(Enum):
    """What a key affects, if this matters to a resume or a second stage; or what it belongs to, if
    it has no effect elsewhere.
    """

    DATA = "affects which examples there are, and their order"
    HEADS = "affects what kind of heads, and their shape"
    WEIGHTS = "affects which other weights are trained, and the states of the optimizer"
    JOINT = "belongs to joint training (medusa2)"
    ADAPTER = "belongs to training through an adapter"
    THIS_RUN = "belongs to this run alone, not its stage one"
    LOCAL = "belongs to an evaluation in this process"
    SERVER = "belongs to an evaluation of a server"
    SERVE = "belongs to an evaluation of servers that it starts itself"


DATA, HEADS, WEIGHTS, JOINT, ADAPTER, THIS_RUN, LOCAL, SERVER, SERVE = Mark


def key(default: Any, description: str, *marks: Mark, **limits: Any) -> Any:
    """Declare a key.

    Args:
        default: `...` if the key is required.
        description: one line for the reference of all keys.
        marks: what the key affects or belongs to.
        limits: limits of the value, as in `pydantic.Field`.
    """
    field = Field(default, description=description, **limits)
    field.metadata += marks
    return field


def keys_marked(cls: type[BaseModel], *marks: Mark) -> tuple[str, ...]:
    """Return the keys of a configuration that have one of the marks, in their order."""
    fields = cls.model_fields.items()
    return tuple(name for name, field in fields if any(mark in field.metadata for mark in marks))


class Section(BaseModel):
    """Base class of everything that has keys. An empty key (null) means its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Keys of Axolotl, with what to do instead.
    axolotl_hints: ClassVar[Mapping[str, str]] = {}
    #: If a section is written as plain text, the text is the value of this key.
    text_key: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_keys(cls, values: Any) -> Any:
        if isinstance(values, str) and cls.text_key is not None:
            return {cls.text_key: values}
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None or name not in cls.model_fields
        }


class Config(Section):
    """Base class of the configurations of commands, read by `load_config`.

    An instance is complete: values that follow from other keys are filled in, and no rule between
    keys is broken.
    """

    #: Axolotl keys without a meaning here: accepted with any value, and listed as ignored.
    ignored_axolotl_keys: ClassVar[frozenset[str]] = frozenset()
    #: (key, other): `key` on the command line replaces `other` of the file.
    replaces: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: Options whose names differ from those of their keys.
    options: ClassVar[Mapping[str, str]] = {}

    #: Where each key was set, and which settings are ignored.
    _source: Source = PrivateAttr(default_factory=lambda: Source("configuration"))

    @model_validator(mode="after")
    def _complete(self: Self) -> Self:
        # The model is frozen, and derived values must not count as set by the user
        # (`model_fields_set`), so this does not assign attributes.
        self.__dict__.update(self.derived())
        broken = []
        for keys, message in self.violations():
            name = next((key for key in keys if key in self.model_fields_set), keys[0])
            error = PydanticCustomError("rule", "{text}", {"text": message, "keys": keys})
            broken.append(InitErrorDetails(type=error, loc=(name,), input=getattr(self, name)))
        if broken:
            raise ValidationError.from_exception_data(type(self).__name__, broken)
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that the user set and that have no effect. Keys set to a default of false, 0 or null
        are not listed.
        """
        names = set(self._source.ignored)
        for name in self.model_fields_set.intersection(self.ineffective_keys()):
            value = getattr(self, name)
            if value or value != type(self).model_fields[name].default:
                names.add(name)
        return tuple(sorted(names))

    @classmethod
    def option_of(cls, name: str) -> str:
        """Return the option of a key, or several with spaces between them. `max_new_tokens` is
        --max-new-tokens; `options` has the exceptions.
        """
        return cls.options.get(name, f"--{name.replace('_', '-')}")

    def origin(self, name: str) -> tuple[str, ...]:
        """Return where a key was set, then the overrides of parts of its value; empty if it was not
        set.
        """
        within = [place for path, place in self._source.places.items() if path[0] == name]
        if name not in self.model_fields_set or not within:
            return ()
        overrides = [place for place in within if place.is_override]
        return tuple(dict.fromkeys(map(str, (within[0], *overrides))))

    def ineffective_keys(self) -> Iterable[str]:
        """Yield the keys that have no effect given the values of the others; `dump_config` omits them."""
        return ()

    def derived(self) -> dict[str, Any]:
        """Return the values that follow from other keys, by name."""
        return {}

    def violations(self) -> Iterable[Violation]:
        """Yield the rules between keys that the values break."""
        return ()


#: The keys that a broken rule is about, and what is wrong. It is reported at the first of the keys
#: that the user set.
Violation = tuple[tuple[str, ...], str]

"""The value types of configuration keys: strict where a slip could hide, friendly where YAML is odd.

Knows no key. PyYAML reads `1e-3` as text and `yes` as a boolean: a number key takes the first and refuses the
second. Each type raises `PydanticCustomError`, whose text is shown to the user as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema
from pydantic_core import PydanticCustomError

#: The spellings of lambda0's schedule.
SCHEDULES = r"^(constant|linear|sine|sine_(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?))$"


def show(value: object) -> str:
    """A value as a user would recognise it: YAML's spelling of booleans and null, long values shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(wanted: str, value: object) -> PydanticCustomError:
    text = f"expected {wanted}, got {show(value)}"
    if isinstance(value, bool):
        text += " (YAML reads yes, no, on and off as true and false)"
    # Braces in the text would be taken for placeholders of the template, hence the context.
    return PydanticCustomError("config_type", "{text}", {"text": text})


def _as_float(value: object) -> object:
    number: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or not math.isfinite(number):
        raise _refuse("a number", value)
    return number


def _as_int(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (float, str)):
        try:
            number = float(value)
        except ValueError:
            raise _refuse("a whole number", value) from None
        if math.isfinite(number) and number.is_integer():
            return int(number)
    raise _refuse("a whole number", value)


def _as_bool(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _refuse("true or false", value)


def _as_text(value: object) -> object:
    if isinstance(value, str):
        if not value.strip():
            raise PydanticCustomError("config_type", "is empty; leave the key out, or give it a value")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _refuse("text (put it in quotes)", value)


def _as_bool_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return _as_bool(value)
    except PydanticCustomError:
        raise _refuse("true, false or auto", value) from None


def _as_resume(value: object) -> object:
    """True and auto mean the newest checkpoint, false means a new run; anything else is a path."""
    if isinstance(value, bool):
        return "latest" if value else None
    if value == "auto":
        return "latest"
    return _as_text(value)


def _as_interval(value: object) -> object:
    """Axolotl's rule: a whole number counts steps, a number below 1 is a share of the run."""
    try:
        number = _as_float(value)
    except PydanticCustomError:
        raise _refuse("a number of steps, or a share of the run below 1", value) from None
    assert isinstance(number, float)
    if 0 < number < 1:
        return number
    if number >= 1 and number.is_integer():
        return int(number)
    raise _refuse("a number of steps (1 or more), or a share of the run below 1", value)


def _as_text_or_mapping(value: object) -> object:
    return value if isinstance(value, dict) else _as_text(value)


def _as_schedule(value: object) -> object:
    """lambda0's schedule (the Medusa fork's names): sine_R rises until the share R of the run."""
    if isinstance(value, str) and re.fullmatch(SCHEDULES, value):
        return value
    raise _refuse("constant, linear, sine, or sine_R with a share R of the run such as sine_0.5", value)


def _as_list(value: object) -> object:
    """One item may be written without the list around it."""
    return value if isinstance(value, list) else [value]


def _one_or_more(item: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of what `_as_list` takes."""
    return {"anyOf": [item, {"type": "array", "items": item}]}


Float = Annotated[float, BeforeValidator(_as_float)]
Int = Annotated[int, BeforeValidator(_as_int)]
Bool = Annotated[bool, BeforeValidator(_as_bool)]
Text = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "integer"]})]
#: true, false or "auto" (true where the device computes it well).
BoolOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_as_bool_or_auto)]
#: None (a new run), "latest" or a path.
Resume = Annotated[
    str | None, BeforeValidator(_as_resume), WithJsonSchema({"type": ["boolean", "string", "integer", "null"]})
]
#: int: every so many optimizer steps; float: every such share of the run.
Interval = Annotated[int | float, BeforeValidator(_as_interval)]
TextList = Annotated[list[Text], BeforeValidator(_as_list), WithJsonSchema(_one_or_more({"type": "string"}))]
TextOrMapping = Annotated[str | dict[str, Any], BeforeValidator(_as_text_or_mapping)]
#: Whose layout an export has; "merged" is the trained backbone itself.
ExportTarget = Literal["reference", "reference-v2", "tgi", "vllm", "trtllm", "merged"]
ExportTargets = Annotated[
    list[ExportTarget],
    BeforeValidator(_as_list),
    WithJsonSchema(_one_or_more({"enum": list(get_args(ExportTarget))})),
]
#: "constant", "linear", "sine" or "sine_R".
Schedule = Annotated[str, BeforeValidator(_as_schedule), WithJsonSchema({"type": "string", "pattern": SCHEDULES})]


Self = TypeVar("Self", bound="Config")


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a key: its default (`...` where it has to be given), its meaning in one line, its limits."""
    return Field(default, description=meaning, **limits)


@dataclass(frozen=True)
class Constraint:
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
    ignored_axolotl_keys: ClassVar[frozenset[str]] = frozenset()
    constraints: ClassVar[tuple[Constraint, ...]] = ()

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
    def ineffective_keys(self) -> tuple[str, ...]:
        """Keys that change nothing beside the values of the others, whatever they hold; a dump leaves them out."""
        return ()

    def resolved(self: Self) -> Self:
        """This configuration with the values filled in that follow from other keys."""
        return self

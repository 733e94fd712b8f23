"""Define the value types of configuration keys and the base class of configurations.

PyYAML reads `1e-3` as text and `yes` as a boolean: number keys accept the first and reject the
second. Each type raises `PydanticCustomError`, whose text is shown to the user unchanged.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Flag, auto
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from medusa_train.config.paths import expand_variables
from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import mask, remember, remember_address

#: The key that describes a first stage, and the name of its directory in the run directory.
STAGE_ONE = "stage_one"
#: Pattern of the schedules of lambda0.
SCHEDULES = r"^(constant|linear|sine|sine_(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?))$"


#: What the rendering of a chat sets: variables of a template that nobody else may set.
RENDERING = frozenset(
    {
        "messages",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
#: Variables that belong to a chat, not to a configuration.
_OF_CHATS = frozenset({"tools", "documents"})


def format_value(value: object) -> str:
    """Format a value for messages: booleans and null as in YAML, long values shortened."""
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
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a number of many digits"
    text = str(value)
    if isinstance(value, str):
        text = repr(value)
    text = mask(text)
    if len(text) > 60:
        text = text[:57] + "..."
    return text


def _type_error(expected: str, value: object) -> PydanticCustomError:
    text = f"expected {expected}, got {format_value(value)}"
    if isinstance(value, bool):
        text += " (YAML reads yes, no, on and off as true and false)"
    return _refusal(text)


def _refusal(text: str) -> PydanticCustomError:
    """Return an error whose text is shown as it is: pydantic would read braces as placeholders."""
    return PydanticCustomError("config_type", "{text}", {"text": text})


def _as_float(value: object) -> object:
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise _type_error("a number", value)
    return number


def _as_int(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        exact = math.nan
        if isinstance(value, (float, str)):
            with suppress(ValueError):
                exact = float(value)
        if not exact.is_integer():  # nor is it finite
            raise _type_error("an integer", value)
        number = int(exact)
    if abs(number) >= 1 << 63:  # torch takes 64 bits, random seeds included
        raise _type_error("an integer of 64 bits", value)
    return number


def _as_bool(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _type_error("true or false", value)


def _as_text(value: object) -> object:
    """Validate text, and expand environment variables in it."""
    if isinstance(value, str):
        if not value.strip():
            raise PydanticCustomError(
                "config_type", "is empty; leave the key out, or give it a value"
            )
        try:
            text = expand_variables(value)
        except ConfigError as error:
            raise _refusal(str(error)) from None
        _refuse_password(text)
        return text
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _type_error("text (put it in quotes)", value)


def _as_plain_text(value: object) -> object:
    """Validate text that is taken as it is written."""
    if isinstance(value, str) and value.strip():
        _refuse_password(value)
        return value
    return _as_text(value)


def _refuse_password(text: str) -> None:
    """Refuse a web address with a user name or a password, which would appear in messages and
    files.
    """
    if re.match(r"[a-z][\w+.-]*://[^/]*@", text, re.IGNORECASE):
        remember_address(text)
        raise _refusal(
            f"{mask(text)} contains a user name or a password, which would appear in messages; keys"
            " of servers are read from environment variables"
        )


def _as_address(value: object) -> object:
    """Validate the address of a server."""
    text = _as_text(value)
    assert isinstance(text, str)
    problem = address_problem(text)
    if problem is not None:
        raise _refusal(problem)
    return text


def address_problem(url: str) -> str | None:
    """Return what is wrong with the address of an OpenAI-compatible server; None if nothing is.

    Whatever could be a key in it is masked from now on.
    """
    example = "expected an address such as http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError above 65535
    except ValueError as error:
        has_password = "@" in url
        remember_address(url)
        reason = "" if has_password else f"{error}; "  # it may show a part of the password
        return f"{mask(url)}: {reason}{example}"
    if parts.username or parts.password or parts.query or parts.fragment:
        remember_address(url)
        for pair in f"{parts.query}&{parts.fragment}".split("&"):
            remember(pair.rpartition("=")[2])
        return (
            f"{mask(url)} contains a password or a query, which would appear in messages; set the"
            " environment variable OPENAI_API_KEY (api_key_env names another) to the API key"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remember_address(url if "://" in url else f"http://{url}")
        return f"{mask(url)}: {example}"
    return None


def _as_variable_name(value: object) -> object:
    """Validate the name of an environment variable; a key in its place is not shown."""
    text = _as_text(value)
    assert isinstance(text, str)
    is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None
    if is_name and (text in os.environ or text.upper() == text):
        return text
    remember(text)
    raise _refusal(
        "expected the name of an environment variable that holds the key, such as OPENAI_API_KEY,"
        " not the key itself"
    )


def _as_bool_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return _as_bool(value)
    except PydanticCustomError:
        raise _type_error("true, false or auto", value) from None


def _as_resume(value: object) -> object:
    """Map true and auto to "latest", false to None (a new run), also where they are typed as text;
    anything else is a path.
    """
    word = str(value).lower()
    if word in ("true", "yes", "on", "auto"):
        return "latest"
    if word in ("false", "no", "off"):
        return None
    return _as_text(value)


def _as_interval(value: object) -> object:
    """Validate a number of steps (1 or more), or a fraction of the run (below 1), as in Axolotl."""
    try:
        number = _as_float(value)
    except PydanticCustomError:
        raise _type_error("a number of steps, or a share of the run below 1", value) from None
    assert isinstance(number, float)
    if 0 < number < 1:
        return number
    if number >= 1 and number.is_integer():
        return int(number)
    raise _type_error("a number of steps (1 or more), or a share of the run below 1", value)


def _as_template_kwargs(value: object) -> object:
    if not isinstance(value, dict):
        raise _type_error("a mapping such as {enable_thinking: false}", value)
    reserved = sorted((RENDERING | _OF_CHATS).intersection(value))
    if reserved:
        text = f"{', '.join(reserved)}: set by the renderer itself; remove it"
        raise _refusal(text)
    for name in value:
        if not name.isidentifier():
            text = f"{format_value(name)} is not the name of a variable"
            raise _refusal(text)
    return value


#: Roles that a token of the vocabulary can be given.
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def _as_special_tokens(value: object) -> object:
    """Validate Axolotl's `special_tokens`: roles and tokens."""
    if not isinstance(value, dict):
        raise _type_error("a mapping such as {eos_token: <|im_end|>}", value)
    for role, token in value.items():
        problem = None
        if role == "additional_special_tokens":
            problem = (
                "tokens cannot be added, since the backbone has no embeddings of them; remove it"
            )
        elif role not in SPECIAL_TOKENS:
            problem = f"unknown; choose {', '.join(SPECIAL_TOKENS)}"
        elif not isinstance(token, str) or not token:
            problem = f"expected a token such as <|im_end|>, got {format_value(token)}"
        if problem is not None:
            raise PydanticCustomError("config_type", "{text}", {"text": f"{role}: {problem}"})
    return value


#: The chat templates that this package has.
CHAT_TEMPLATES = ("vicuna_v1.1", "zephyr", "chatml", "llama-2", "llama-3", "mistral")
TEMPLATE_SUFFIX = ".jinja"  # of a file with a chat template


def _as_chat_template(value: object) -> object:
    """Validate the name of a chat template; Axolotl's `tokenizer_default` is None."""
    if value is None or value == "tokenizer_default":
        return None
    name = _as_text(value)
    if name in CHAT_TEMPLATES or str(name).endswith(TEMPLATE_SUFFIX):
        return name
    hint = ""
    near = difflib.get_close_matches(str(name), CHAT_TEMPLATES, n=1)
    if near:
        hint = f"did you mean {near[0]}? "
    text = (
        f"chat template {format_value(value)} is unknown; {hint}choose"
        f" {', '.join(CHAT_TEMPLATES)}, a {TEMPLATE_SUFFIX} file, or leave it out for the"
        " tokenizer's own"
    )
    raise PydanticCustomError("config_type", "{text}", {"text": text})


#: Axolotl's names of the parts of a turn that `message_property_mappings` may map.
_PROPERTIES = ("role", "content")
#: The roles to which `roles` may map names.
_TARGET_ROLES = ("system", "user", "assistant", "tool")


def _as_property_mappings(value: object) -> object:
    """Validate Axolotl's `message_property_mappings`: keys of a turn by what they hold."""
    if not isinstance(value, dict):
        raise _type_error("a mapping such as {role: from, content: value}", value)
    for name, source in value.items():
        problem = None
        if name not in _PROPERTIES:
            problem = f"unknown; choose {' and '.join(_PROPERTIES)}"
        elif not isinstance(source, str) or not source:
            problem = f"expected the name of a key, got {format_value(source)}"
        if problem is not None:
            raise PydanticCustomError("config_type", "{text}", {"text": f"{name}: {problem}"})
    return value


def _as_roles(value: object) -> object:
    """Validate Axolotl's `roles`: names in the data by role, each name once."""
    if not isinstance(value, dict):
        raise _type_error("a mapping such as {user: [human], assistant: [gpt]}", value)
    seen: dict[str, str] = {}
    roles: dict[str, list[str]] = {}
    for role, names in value.items():
        listed = _as_list(names)
        problem = None
        if role not in _TARGET_ROLES:
            problem = f"unknown; choose {', '.join(_TARGET_ROLES)}"
        elif not all(isinstance(name, str) and name for name in listed):
            problem = f"expected names of roles, got {format_value(names)}"
        else:
            twice = [name for name in listed if name in seen]
            if twice:
                problem = f"{twice[0]} is listed as {seen[twice[0]]}, too"
        if problem is not None:
            raise PydanticCustomError("config_type", "{text}", {"text": f"{role}: {problem}"})
        seen.update(dict.fromkeys(listed, role))
        roles[role] = listed
    return roles


def _as_reasoning_tags(value: object) -> object:
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(tag, str) and tag.strip() for tag in value)
    ):
        return tuple(tag.strip() for tag in value)
    raise _type_error("two tags such as [<think>, </think>]", value)


def _as_schedule(value: object) -> object:
    """Validate a schedule of lambda0 (names of Axolotl's Medusa fork); sine_R rises over the
    fraction R of the run.
    """
    if isinstance(value, str) and re.fullmatch(SCHEDULES, value):
        return value
    raise _type_error(
        "constant, linear, sine, or sine_R with a share R of the run such as sine_0.5", value
    )


def _as_list(value: object) -> list[Any]:
    """Accept a single item in place of a list."""
    if isinstance(value, list):
        return value
    return [value]


def _one_or_more(item: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an item, or a list of such items."""
    return {"anyOf": [item, {"type": "array", "items": item}]}


Float = Annotated[float, BeforeValidator(_as_float)]
Int = Annotated[int, BeforeValidator(_as_int)]
Bool = Annotated[bool, BeforeValidator(_as_bool)]
Text = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "integer"]})]
#: Address of an OpenAI-compatible server.
Address = Annotated[str, BeforeValidator(_as_address), WithJsonSchema({"type": "string"})]
#: Name of an environment variable that holds a key.
VariableName = Annotated[
    str, BeforeValidator(_as_variable_name), WithJsonSchema({"type": "string"})
]
#: true, false or "auto" (true if the device supports it well).
BoolOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_as_bool_or_auto)]
#: None (a new run), "latest" or a path.
Resume = Annotated[
    str | None,
    BeforeValidator(_as_resume),
    WithJsonSchema({"type": ["boolean", "string", "integer", "null"]}),
]
#: int: interval in optimizer steps; float: interval as a fraction of the run.
Interval = Annotated[int | float, BeforeValidator(_as_interval)]
#: Its items are taken as they are: `$` may belong to a pattern.
_PlainText = Annotated[str, BeforeValidator(_as_plain_text)]
TextList = Annotated[
    list[_PlainText], BeforeValidator(_as_list), WithJsonSchema(_one_or_more({"type": "string"}))
]
Addresses = Annotated[
    list[Address], BeforeValidator(_as_list), WithJsonSchema(_one_or_more({"type": "string"}))
]
#: Positive integers; a single one is a list of one.
IntList = Annotated[
    list[Annotated[int, BeforeValidator(_as_int), Field(ge=1)]],
    BeforeValidator(_as_list),
    WithJsonSchema(_one_or_more({"type": "integer", "minimum": 1})),
]
GpuKernel = Literal["split_attention", "layer_programs", "fused_linears", "coordinate_descent"]
#: Parts for GPUs; a single one is a list of one.
GpuKernels = Annotated[
    list[GpuKernel],
    BeforeValidator(_as_list),
    WithJsonSchema(_one_or_more({"enum": list(get_args(GpuKernel))})),
]
TextOrMapping = Annotated[
    str | dict[str, Any], BeforeValidator(lambda x: x if isinstance(x, dict) else _as_text(x))
]
#: Variables of a chat template, by name.
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(_as_template_kwargs)]
#: Tokens of the vocabulary by the role that they get, as in Axolotl.
SpecialTokens = Annotated[dict[str, str], BeforeValidator(_as_special_tokens)]
#: Name of a chat template, or a .jinja file; None: the tokenizer's own.
ChatTemplateName = Annotated[
    str | None,
    BeforeValidator(_as_chat_template),
    WithJsonSchema({"type": ["string", "null"]}),
]
#: Keys of a turn by what they hold, as in Axolotl.
PropertyMappings = Annotated[dict[str, str], BeforeValidator(_as_property_mappings)]
#: Names in the data by role, as in Axolotl.
RoleNames = Annotated[
    dict[str, list[str]],
    BeforeValidator(_as_roles),
    WithJsonSchema({"type": "object", "additionalProperties": _one_or_more({"type": "string"})}),
]
#: The tags before and after the reasoning part of an answer.
ReasoningTags = Annotated[
    tuple[str, str],
    BeforeValidator(_as_reasoning_tags),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}),
]
#: Weights of a backbone in 4-bit NormalFloat (QLoRA) or as LLM.int8, by bitsandbytes.
Quantization = Literal["nf4", "int8"]
#: Layout of an export; "merged" is the backbone with its adapter merged.
ExportTarget = Literal[
    "reference",
    "reference-v2",
    "tgi",
    "vllm",
    "sglang",
    "speculators",
    "trtllm",
    "transformers",
    "merged",
]
ExportTargets = Annotated[
    list[ExportTarget],
    BeforeValidator(_as_list),
    WithJsonSchema(_one_or_more({"enum": list(get_args(ExportTarget))})),
]
#: "constant", "linear", "sine" or "sine_R".
Schedule = Annotated[
    str, BeforeValidator(_as_schedule), WithJsonSchema({"type": "string", "pattern": SCHEDULES})
]


Self = TypeVar("Self", bound="Config")
F = TypeVar("F", bound=Flag)


class Affects(Flag):
    """What the value of a key of training changes: what a resume and a second stage must know of it.

    Attributes:
        DATA: which examples there are, and their order. HEADS: what kind of heads, and their shape.
        WEIGHTS: which other weights are trained, and the states of the optimizer.
        OPTIMIZATION: how they are trained; may change at a resume.
        NOTHING: nothing that is trained: places, logs, speed.
    """

    DATA = auto()
    HEADS = auto()
    WEIGHTS = auto()
    OPTIMIZATION = auto()
    NOTHING = auto()


class Stage(Flag):
    """How a key goes with stage one.

    Attributes:
        SHARED: stage one takes the value of the configuration that names it, where that sets one.
        WHOLE_RUN: stage one's file does not set it: the run decides for both stages.
    """

    SHARED = auto()
    WHOLE_RUN = auto()


_AFFECTS, _STAGE = "affects", "stage"  # entries of a field that no schema shows
#: What a key says for this program alone.
INTERNAL = (_AFFECTS, _STAGE)


def key(
    default: Any,
    description: str,
    *,
    affects: Affects | None = None,
    stage: Stage | None = None,
    **limits: Any,
) -> Any:
    """Declare a key: default (`...` if required), one-line description, what it affects, limits."""
    said = {_AFFECTS: affects, _STAGE: stage}
    extra = {name: value for name, value in said.items() if value is not None}
    return Field(default, description=description, json_schema_extra=extra or None, **limits)  # type: ignore[arg-type]


def keys_affecting(cls: type[BaseModel], affects: Affects) -> tuple[str, ...]:
    """Return the keys of a configuration that affect something, in their order."""
    return tuple(
        name
        for name, field in cls.model_fields.items()
        if affects & _said(field, _AFFECTS, affects)
    )


def keys_of_stage(cls: type[BaseModel], stage: Stage) -> tuple[str, ...]:
    """Return the keys of a configuration that go with stage one in this way, in their order."""
    return tuple(
        name for name, field in cls.model_fields.items() if stage & _said(field, _STAGE, stage)
    )


def _said(field: FieldInfo, name: str, like: F) -> F:
    """Return what a key says under `name`; nothing of this kind where it says nothing."""
    nothing = type(like)(0)
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        return nothing
    value = extra.get(name)
    return value if isinstance(value, type(like)) else nothing


@dataclass(frozen=True)
class Constraint:
    """A condition on several keys that a configuration must not violate.

    It is checked only if each of `keys` has a valid value, so that it can be reported together with
    errors in other keys.

    Attributes:
        keys: the keys that it reads; the problem is reported at the first one that the user set.
        violated: function of the configuration that returns True for values that are not allowed;
            reads only `keys`.
        message: what is wrong and what to do.
    """

    keys: tuple[str, ...]
    violated: Callable[[Any], bool]
    message: str


class Config(BaseModel):
    """Base class of configurations: flat keys, read by `load.load_config`, which reports all
    problems at once.

    The constructor validates single values; constraints between keys are checked by `load_config`.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    #: Axolotl keys without a meaning here: accepted with any value, and listed as ignored.
    ignored_axolotl_keys: ClassVar[frozenset[str]] = frozenset()
    constraints: ClassVar[tuple[Constraint, ...]] = ()
    #: (key, other): `key` on the command line replaces `other` of the file.
    replaces: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: Options of keys that are not named as the key is.
    options: ClassVar[Mapping[str, str]] = {}

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _origins: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that the user set and that have no effect, but for those left at a default of false,
        0 or null.
        """
        names = set(self._ignored)
        fields = type(self).model_fields
        for name in self.model_fields_set.intersection(self.ineffective_keys):
            value = getattr(self, name)
            if value or value != fields[name].default:
                names.add(name)
        return tuple(sorted(names))

    @classmethod
    def option_of(cls, name: str) -> str:
        """Return a key's option, or several with spaces: `max_new_tokens` is --max-new-tokens, but
        for some keys.
        """
        return cls.options.get(name, f"--{name.replace('_', '-')}")

    def origin(self, name: str) -> tuple[str, ...]:
        """Return where a key was set: locations in files, overrides, flags; empty if it was not
        set.
        """
        return self._origins.get(name, ())

    @property
    def ineffective_keys(self) -> tuple[str, ...]:
        """Keys that have no effect given the values of the others; `dump_config` omits them."""
        return ()

    def resolved(self: Self) -> Self:
        """Return a copy with the values filled in that are derived from other keys."""
        return self

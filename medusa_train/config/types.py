"""Define the types of values.

PyYAML reads `1e-3` as text and `yes` as a boolean, and pydantic would read true as 1. The types of
numbers accept such text and reject booleans.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

from medusa_train.config.paths import expand_variables
from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import excerpt, remember, remember_address

#: The key that describes a first stage, and the name of its directory in the run directory.
STAGE_ONE = "stage_one"
#: Pattern of the schedules of lambda0.
SCHEDULES = r"^(constant|linear|sine|sine_(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?))$"
#: Variables of a chat template that its renderer sets.
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
#: Variables of a chat template that belong to a chat, not to a configuration.
_CHAT_VARIABLES = frozenset({"tools", "documents"})
#: The chat templates of this package.
CHAT_TEMPLATES = ("vicuna_v1.1", "zephyr", "chatml", "llama-2", "llama-3", "mistral")
TEMPLATE_SUFFIX = ".jinja"  # suffix of a file with a chat template

T = TypeVar("T")


def format_value(value: object) -> str:
    """Format a value for messages: booleans and null as in YAML, long values shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a number of many digits"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{excerpt(text, 57)}..."


def problem(text: str) -> PydanticCustomError:
    """Return the error of a value. Its text is shown unchanged, braces included."""
    return PydanticCustomError("problem", "{text}", {"text": text})


def expected(what: str, value: object) -> PydanticCustomError:
    """Return the error of a value of the wrong type or form."""
    text = f"expected {what}, got {format_value(value)}"
    if isinstance(value, bool):
        text += " (YAML reads yes, no, on and off as true and false)"
    return problem(text)


def _number(given: object) -> object:
    """Convert text and floats without a fraction to numbers; return other values unchanged."""
    value = given
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and abs(value) >= 1 << 63:  # torch takes 64 bits, for seeds too
        raise expected("a number of 64 bits", given)
    return value


def _boolean(value: object) -> object:
    """Convert the texts true and false to booleans; return other values unchanged."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _boolean_or_auto(value: object) -> object:
    value = _boolean(value)
    if isinstance(value, bool) or value == "auto":
        return value
    raise expected("true, false or auto", value)


def _digits(value: object) -> object:
    """Convert a number to its digits; return other values unchanged."""
    return str(value) if type(value) is int else value


def _plain_text(text: str) -> str:
    """Validate text, and return it unchanged."""
    if not text.strip():
        raise problem("is empty; leave the key out, or give it a value")
    if re.match(r"[a-z][\w+.-]*://[^/]*@", text, re.IGNORECASE):
        raise problem(
            f"{text} contains a user name or a password, which would appear in messages; keys of"
            " servers are read from environment variables"
        )
    return text


def _text(text: str) -> str:
    """Validate text, and expand environment variables in it. Most texts are names of files or
    directories.
    """
    try:
        text = _plain_text(expand_variables(text))
    except ConfigError as error:
        raise problem(str(error)) from None
    path = text.encode("utf-8", "surrogatepass")
    if len(path) > 4095 or max(map(len, path.split(b"/"))) > 255:
        raise problem(f"{format_value(text)} is longer than the name of a file can be (255 bytes)")
    return text


def _text_or_mapping(value: object) -> object:
    return value if isinstance(value, dict) else TypeAdapter(Text).validate_python(value)


def address_problem(url: str) -> str | None:
    """Return what is wrong with the address of an OpenAI-compatible server; None if nothing is.

    If something is wrong, every part of the address that could be a key is masked from now on.
    """
    example = "expected an address such as http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError above 65535
    except ValueError as error:
        remember_address(url)
        reason = "" if "@" in url else f"{error}; "  # it may show a part of the password
        return f"{url}: {reason}{example}"
    if parts.username or parts.password or parts.query or parts.fragment:
        remember_address(url)
        for pair in f"{parts.query}&{parts.fragment}".split("&"):
            remember(pair.rpartition("=")[2])
        return (
            f"{url} contains a password or a query, which would appear in messages; set the"
            " environment variable OPENAI_API_KEY (api_key_env names another) to the API key"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remember_address(url if "://" in url else f"http://{url}")
        return f"{url}: {example}"
    return None


def _address(text: str) -> str:
    wrong = address_problem(text)
    if wrong is not None:
        raise problem(wrong)
    return text


def _variable_name(text: str) -> str:
    """Validate the name of an environment variable. If it is a key instead, the key
    is not shown.
    """
    if text.isidentifier() and (text in os.environ or text.upper() == text):
        return text
    remember(text)
    raise problem(
        "expected the name of an environment variable that holds the key, such as OPENAI_API_KEY,"
        " not the key itself"
    )


def _resume(value: object) -> object:
    """Map true and auto to "latest", false to None (a new run); anything else is a path."""
    word = str(value).lower()
    if word in ("true", "yes", "on", "auto"):
        return "latest"
    return None if word in ("false", "no", "off") else value


def _interval(value: object) -> object:
    """Validate a number of steps (1 or more), or a fraction of the run (below 1), as in Axolotl."""
    number = _number(value)
    if (type(number) is int and number >= 1) or (type(number) is float and 0 < number < 1):
        return number
    raise expected("a number of steps (1 or more), or a share of the run below 1", value)


def _schedule(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(SCHEDULES, value):
        return value
    raise expected(
        "constant, linear, sine, or sine_R with a share R of the run such as sine_0.5", value
    )


def _chat_template(name: str | None) -> str | None:
    """Validate the name of a chat template; Axolotl's `tokenizer_default` is None."""
    if name is None or name == "tokenizer_default":
        return None
    if (unknown := unknown_template(name)) is not None:
        raise problem(unknown)
    return name


def unknown_template(name: str) -> str | None:
    """Return what to write in place of `name` if it is neither a built-in chat template nor the
    name of a template file; None if it is one.
    """
    if name in CHAT_TEMPLATES or name.endswith(TEMPLATE_SUFFIX):
        return None
    near = difflib.get_close_matches(name, CHAT_TEMPLATES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"chat template {format_value(name)} is unknown; {hint}choose {', '.join(CHAT_TEMPLATES)},"
        f" a {TEMPLATE_SUFFIX} file, or leave it out for the tokenizer's own"
    )


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted((RENDERING | _CHAT_VARIABLES).intersection(value))
    if reserved:
        raise problem(f"{', '.join(reserved)}: set for each chat by its record; remove it")
    for name in value:
        if not name.isidentifier():
            raise problem(f"{format_value(name)} is not the name of a variable")
    return value


def _different_names(roles: dict[str, list[str]]) -> dict[str, list[str]]:
    """Validate that no name means two roles."""
    roles_by_name: dict[str, str] = {}
    for role, names in roles.items():
        for name in names:
            if name in roles_by_name:
                raise problem(f"{role}: {name} is listed as {roles_by_name[name]}, too")
            roles_by_name[name] = role
    return roles


def _tags(value: object) -> object:
    tags = value if isinstance(value, (list, tuple)) else ()
    if len(tags) != 2 or not all(isinstance(tag, str) and tag.strip() for tag in tags):
        raise expected("two tags such as [<think>, </think>]", value)
    return [tag.strip() for tag in tags]


def as_list(value: object) -> object:
    """Accept a single item in place of a list."""
    return value if isinstance(value, list) else [value]


Int = Annotated[int, Field(strict=True), BeforeValidator(_number)]
PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
#: Size of a reduced vocabulary.
VocabSize = Annotated[Int, Field(ge=16)]
_Float = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_number)]
PositiveFloat = Annotated[_Float, Field(gt=0)]
NonNegativeFloat = Annotated[_Float, Field(ge=0)]
#: Share: 0 to 1; PositiveShare: above 0; Fraction: below 1.
Share = Annotated[_Float, Field(ge=0, le=1)]
PositiveShare = Annotated[_Float, Field(gt=0, le=1)]
Fraction = Annotated[_Float, Field(ge=0, lt=1)]
Bool = Annotated[bool, BeforeValidator(_boolean), Field(strict=True)]
#: true, false or "auto" (true if the device supports it well).
BoolOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_boolean_or_auto)]
#: Text without expansion of variables: `$` may be part of a pattern.
PlainText = Annotated[
    str, Field(strict=True), BeforeValidator(_digits), AfterValidator(_plain_text)
]
Text = Annotated[PlainText, AfterValidator(_text), WithJsonSchema({"type": ["string", "integer"]})]
TextOrMapping = Annotated[str | dict[str, Any], BeforeValidator(_text_or_mapping)]
#: Address of an OpenAI-compatible server.
Address = Annotated[Text, AfterValidator(_address)]
#: Name of an environment variable that holds a key.
VariableName = Annotated[Text, AfterValidator(_variable_name)]
#: None (a new run), "latest" or a path.
Resume = Annotated[
    Text | None,
    BeforeValidator(_resume),
    WithJsonSchema({"type": ["boolean", "string", "integer", "null"]}),
]
#: int: interval in optimizer steps; float: interval as a fraction of the run.
Interval = Annotated[int | float, BeforeValidator(_interval)]
#: A list. A single item counts as a list of one.
OneOrMore = Annotated[list[T], BeforeValidator(as_list)]
#: Variables of a chat template, by name.
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_template_variables)]
#: Name of a chat template, or a .jinja file; None: the tokenizer's own.
ChatTemplateName = Annotated[
    Text | None, AfterValidator(_chat_template), WithJsonSchema({"type": ["string", "null"]})
]
#: Roles that a token of the vocabulary can have.
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Names of keys in mappings. For mypy, and so for the rest of the package, they are str.
if TYPE_CHECKING:
    _SpecialToken = str
    _TurnPart = str
    _Role = str
else:
    _SpecialToken = Literal[SPECIAL_TOKENS]
    _TurnPart = Literal["role", "content"]
    _Role = Literal["system", "user", "assistant", "tool"]
#: Tokens of the vocabulary by role, as in Axolotl.
SpecialTokens = dict[_SpecialToken, PlainText]
#: Names of a turn's keys by the part of the turn, as in Axolotl.
PropertyMappings = dict[_TurnPart, PlainText]
#: Names in the data for each role, as in Axolotl.
RoleNames = Annotated[dict[_Role, OneOrMore[PlainText]], AfterValidator(_different_names)]
#: The tags before and after the reasoning part of an answer.
ReasoningTags = Annotated[tuple[str, str], BeforeValidator(_tags)]
#: "constant", "linear", "sine" or "sine_R".
Schedule = Annotated[
    str, BeforeValidator(_schedule), WithJsonSchema({"type": "string", "pattern": SCHEDULES})
]
#: Weights of a target model in 4-bit NormalFloat (QLoRA) or as LLM.int8, by bitsandbytes.
Quantization = Literal["nf4", "int8"]
#: Layout of an export; "merged" is the target model with its adapter merged.
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

"""Built-in chat templates, written from the published prompt formats, and templates from files.

Each is a Jinja template in the format of Hugging Face tokenizers. `{% generation %}` tags enclose
the assistant's text and its end token, for programs that derive a loss mask from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.types import unknown_template
from medusa_train.errors import ConfigError, DataError

# The system prompt that Vicuna v1.1 and later were trained with; their answers are worse without
# it.
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# `turns`: the chat without its system message; `system`: the text of that message, or ''.
_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}"
    "{% set system = '' %}{% set turns = messages %}"
    "{% endif %}"
)

_VICUNA = (
    "{{ bos_token }}"
    + _SPLIT_SYSTEM
    + "{{ (system or "
    + repr(_VICUNA_SYSTEM)
    + ") + ' ' }}"
    + "{% for message in turns %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] }}"
    # Some tokenizers keep the leading space of an answer. It must not be written twice.
    "{% else %}{{ ' ASSISTANT:' }}{% set space = '' if message['content'][:1] == ' ' else ' ' %}"
    "{% generation %}{{ space + message['content'] + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)

_ZEPHYR = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}{%"
    " generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}{% else %}{{"
    " '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}{% endif %}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA_2 = (
    _SPLIT_SYSTEM + "{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token }}{{ '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
    "{{ message['content'] | trim + ' [/INST]' }}"
    "{% else %}"
    "{% generation %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
)

_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] +"
    " '<|end_header_id|>\\n\\n' }}{% if message['role'] == 'assistant' %}{% generation %}{{"
    " message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ message['content']"
    " | trim + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

_MISTRAL = (
    "{{ bos_token }}" + _SPLIT_SYSTEM + "{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' }}{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}"
    "{{ message['content'] | trim + ' [/INST]' }}"
    "{% else %}"
    "{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
)

TEMPLATES = {
    "vicuna_v1.1": _VICUNA,
    "zephyr": _ZEPHYR,
    "chatml": _CHATML,
    "llama-2": _LLAMA_2,
    "llama-3": _LLAMA_3,
    "mistral": _MISTRAL,
}
#: The tokens that end answers. The other built-in templates end them with the tokenizer's EOS token.
_ANSWER_ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>"}


def get_template(name: str) -> str:
    """Return the source of a built-in template by name, or of the template in a Jinja file. A
    relative path is looked up in the working directory and the project.
    """
    if (unknown := unknown_template(name)) is not None:
        raise ConfigError(unknown)
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        source = (resolve_path(name) or Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template '{name}': cannot be read ({error})") from None
    if not source.strip():
        raise ConfigError(f"chat template '{name}': the file is empty")
    return source


def template_source(tokenizer: Any, name: str | None) -> str:
    """Return the source of the template called `name`, or of the tokenizer's own if it is None.

    Raises:
        DataError: the tokenizer has no template, or the token that ends answers in this template is
            not a single token of the tokenizer.
    """
    if name is None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; set chat_template to one of"
                f" {', '.join(TEMPLATES)}"
            )
        try:
            return str(tokenizer.get_chat_template())
        except ValueError:  # several templates by name, none of which is the default
            names = ", ".join(sorted(tokenizer.chat_template))
            raise DataError(
                f"the tokenizer has chat templates of several names ({names}) and none is the"
                " default; save the one to use as a .jinja file and set chat_template to it"
            ) from None
    source = get_template(name)
    if name not in TEMPLATES:
        return source
    end = _ANSWER_ENDS.get(name, tokenizer.eos_token)
    if end is None:
        raise DataError(
            f"chat template '{name}' ends answers with the EOS token, which the tokenizer does not"
            " have"
        )
    # As several tokens it would be trained as plain text, and the target model does not stop at
    # plain text.
    if len(tokenizer(end, add_special_tokens=False)["input_ids"]) != 1:
        raise DataError(
            f"chat template '{name}' ends answers with {end}, which is not a single token of this"
            " tokenizer; use the template that the target model was trained with"
        )
    return source

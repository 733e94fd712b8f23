"""Commands that are shown to the user: a command that generates the data of a training
configuration, and the training command after a run of self-distillation.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.next_command import is_embedded
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.config.yaml_source import read_yaml_file
from medusa_train.errors import ConfigError
from medusa_train.selfdistill.settings import resolve_model_paths

COMMAND = "medusa-selfdistill"

#: Keys that training and self-distillation share, in addition to the model and the data.
_SHARED_KEYS = ("chat_template_kwargs", "special_tokens", "trust_remote_code")


def refuse_training_config(path: Path | None) -> None:
    """Raise ConfigError if `path` is a configuration of medusa-train. The message shows the
    commands that generate its data.
    """
    file = None if path is None else resolve_path(path)
    if file is None or not file.is_file():
        return  # `load_config` reports the error
    values = read_yaml_file(file, str(path)).values
    if "datasets" not in values or "base_model" not in values:
        return
    # base_model is empty in a configuration for any model
    model = str(values["base_model"] or "MODEL")
    written = _commands_in_comments(file.read_text(encoding="utf-8"), model)
    commands = written or list(_commands_for(values, model, file.stem))
    raise ConfigError(
        "\n  ".join([f"{path} is a configuration of medusa-train. To make data for it:", *commands])
    )


def _commands_in_comments(text: str, model: str) -> list[str]:
    """Return the self-distillation commands in a YAML's comments that name its model."""
    comments = "\n".join(re.findall(r"^#(.*)$", text, re.MULTILINE))
    joined = re.sub(r"\\\n\s*", "", comments)
    lines = [line.strip() for line in joined.split("\n")]
    return [line for line in lines if line.startswith(f"{COMMAND} ") and model in line]


def _commands_for(values: Mapping[str, Any], model: str, name: str) -> Iterator[str]:
    """Yield a command for each data set of the training configuration `name` for `model`."""
    datasets = values["datasets"]
    sections = datasets if isinstance(datasets, list) else [datasets]
    for number, section in enumerate(sections, start=1):
        dataset = section if isinstance(section, dict) else {"path": section}
        output = name if len(sections) == 1 else f"{name}_{number}"
        path = dataset.get("path")
        words = ["--prompts", path if isinstance(path, str) and path else "PROMPTS.jsonl"]
        words += ["--model", model]
        template = dataset.get("conversation") or values.get("chat_template")
        if isinstance(template, str) and template not in ("", "tokenizer_default"):
            words += ["--chat-template", template]
        words += ["--output", f"data/selfdistill/{output}.jsonl"]
        if dataset.get("split"):
            words.append(f"split={dataset['split']}")
        words += _overrides(values)
        yield shlex.join([COMMAND, *words])


def next_command(cfg: SelfDistillConfig, output: Path) -> str:
    """Return the command that trains on `output`.

    As in README, answers of a server train an EAGLE-3 draft, which vLLM can serve. Answers of a
    local model train Medusa-1 heads.
    """
    # 1. the target model; if a run trained it with an adapter, it is exported first
    export = ""
    config = "any_eagle3"
    model = str(cfg.base_model)
    if cfg.engine != "openai":
        paths = resolve_model_paths(cfg)
        config = "any_m1"
        model = paths.target_model
        if paths.adapter is not None:
            export = shlex.join(["medusa-export", str(paths.home), "--to", "merged"]) + " && "
            model = f"{paths.home}/export/merged"
    if is_embedded(model):
        config = "tiny_m1"
    # 2. the command
    data = f"datasets=[{{path: {_yaml_text(str(output))}, type: messages}}]"
    words = ["medusa-train", f"configs/{config}.yaml", f"base_model={model}", data]
    if cfg.chat_template is not None:
        words.append(f"chat_template={cfg.chat_template}")
    return export + shlex.join([*words, *_overrides(cfg.model_dump())])


def _yaml_text(text: str) -> str:
    return text if re.fullmatch(r"[\w./~-]+", text) else json.dumps(text, ensure_ascii=False)


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """Return `key=value` for each of `_SHARED_KEYS` that is set."""
    return [f"{key}={json.dumps(values[key])}" for key in _SHARED_KEYS if values.get(key)]

"""Write the model card of an export: what it is, how it was trained, and the results measured here
and in servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load
from jinja2 import Template

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.medusa_layouts import HeadTensors
from medusa_train.checkpoint.resolve import MERGED_CARD, ModelPaths, find_heads, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.data.sources import PUBLIC_DATASETS
from medusa_train.export.publish import MERGED, Export
from medusa_train.inference.decoding_mode import mode_of
from medusa_train.pages.page import Table, number

Json = Mapping[str, Any]

#: Keys of config.yaml that the card lists.
SETTINGS = (
    "recipe",
    "eagle3",
    "medusa_decay_coefficient",
    "medusa_heads_coefficient",
    "medusa_scheduler",
    "medusa_self_distillation",
    "medusa_soft_targets",
    "adapter",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "load_in_4bit",
    "load_in_8bit",
    "sequence_len",
    "num_epochs",
    "max_steps",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "learning_rate",
    "medusa_lr_multiplier",
    "lr_scheduler",
    "warmup_steps",
    "weight_decay",
    "chat_template",
    "chat_template_kwargs",
    "seed",
)


#: The directory part of a local path.
_DIRECTORY = re.compile(r"(?<![^\s'\"])~?/\S*/(?=[^\s/])")


def model_card(export: Export, heads: HeadTensors) -> str:
    """Return the card of Medusa heads, or of the target model that was trained with them; see
    `card`.
    """
    is_merged = export.to == MERGED
    trained_together = export.paths.trained_target_model and not is_merged
    target_model: str | None = export.target_model_name
    if trained_together and target_model == export.paths.target_model:
        target_model = None  # the heads are served with the merged one, which has no name yet
    return card(
        export,
        tag="medusa",
        target_model=target_model,
        title=f"Target model {MERGED_CARD}" if is_merged else "Medusa heads",
        heads=heads,
        trained_together=trained_together,
        served_by_vllm=export.to == "vllm",
    )


def card(export: Export, *, tag: str, target_model: str | None, **facts: Any) -> str:
    """Return a card as Markdown with the hub's YAML header. Local paths are reduced to their last
    part.

    Args:
        tag: kind of the draft, also a tag on the hub.
        target_model: the target model to serve. It is only named if it is a hub repository.
        facts: variables of card.md.jinja that describe the draft.
    """
    # 1. Read the reports that measured this draft. Those without a recommendation did not compare a
    # server with and without it.
    paths = export.paths
    weights = digest_files(find_heads(export.draft).files)[:16]
    reports = list(filter(_is_default, _reports(paths, weights, "eval/*/report.json")))
    served = _reports(paths, weights, "eval/served-*/served.json")
    # Earlier versions reported a speedup even without a tree: the same loop compared with itself.
    treeless = [report for report in reports if report["meta"].get("tree_nodes") == 0]
    shown = [
        report
        for report in reports
        if report not in treeless and report["overall"].get("speedup") is not None
    ]
    # 2. Read the run's configuration, and build the hub's header.
    run = read_mapping(paths.home / CONFIG)
    trained_on = str(run.get("base_model") or paths.target_model)
    data = [
        str(entry["path"] if isinstance(entry, Mapping) else entry)
        for entry in run.get("datasets") or ()
    ]
    header = ModelCardData(
        license=export.licence or _licence_of(trained_on) or "other",
        tags=[tag, "speculative-decoding"],
        base_model=_hub_repository(trained_on),
        datasets=[repo for repo in map(_hub_repository, data) if repo is not None] or None,
    )
    settings = [
        [f"`{key}`", _without_directory(str(run[key]))]
        for key in SETTINGS
        if run.get(key) not in (None, False)
    ]
    # 3. Render the page.
    template = Template(
        Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    text = template.render(
        facts,
        number=number,
        mode_of=mode_of,
        joined=lambda arguments: shlex.join(map(_without_directory, arguments)),
        without_directories=partial(_DIRECTORY.sub, ""),
        tag=tag,
        to=export.to,
        header=header.to_yaml(),
        trained_on=_public(trained_on),
        target_model=_hub_repository(target_model or "") or "TARGET_MODEL",
        data=[_public(name) for name in data],
        settings=Table(["setting", "value"], settings).markdown() if settings else "",
        chains=[report for report in reports if report["overall"].get("chain_rates")],
        shown=shown,
        treeless=treeless,
        served=[report for report in served if report.get("recommendation")],
        licence=export.licence,
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _reports(paths: ModelPaths, weights: str, pattern: str) -> list[Json]:
    """Read the reports of a run that measured heads with these weights. If a run was trained
    further, it still has the reports of its earlier heads. Older reports do not say which heads
    they measured.
    """
    reports = [read_mapping(path) for path in sorted(paths.home.glob(pattern))]
    return [
        report
        for report in reports
        if isinstance(meta := report.get("meta"), Mapping)
        and meta.get("weights", weights) == weights
    ]


def _is_default(report: Mapping[str, Any]) -> bool:
    """Return whether an evaluation decodes greedily, one answer at a time, with the heads and the
    tree in tree.json.
    """
    meta = report["meta"]
    if not report.get("overall") or meta.get("draft") or meta.get("dynamic_trees"):
        return False
    if Path(meta.get("tree_file") or "tree.json").name != "tree.json":
        return False
    mode = mode_of(meta)
    return mode.get("acceptance", "greedy") == "greedy" and mode.get("batch_size", 1) == 1


def _hub_repository(name: str) -> str | None:
    """Return the hub repository of a model or data set, also for our short names; None for a local
    path.
    """
    if name in PUBLIC_DATASETS:
        return PUBLIC_DATASETS[name].hub_repo
    is_file = name.endswith((".jsonl", ".json", ".parquet"))
    if "/" not in name or is_file or looks_like_path(name) or resolve_path(name) is not None:
        return None
    return name


def _public(name: str) -> str:
    """Return the hub name of a model or data set; for a local path, return only its last part."""
    repository = _hub_repository(name)
    if repository is not None:
        return repository
    kind = "file" if Path(name).suffix else "folder"
    return f"`{Path(name).name}` (a local {kind})"


def _licence_of(target_model: str) -> str | None:
    """Read the licence from the model card of a local target model; None if there is none."""
    try:
        metadata = metadata_load(Path(target_model) / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = metadata.get("license")
    return licence if isinstance(licence, str) else None


def _without_directory(argument: str) -> str:
    """Return an argument in which a local path is reduced to its last part."""
    option, equals, value = argument.rpartition("=")
    if value.startswith(("/", "~")):
        return option + equals + Path(value).name
    return option + equals + _DIRECTORY.sub("", value)

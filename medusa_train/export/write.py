"""Export the heads or the target model of a run to the layout of another program, with a model
card; upload the export.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_train.checkpoint.heads import (
    VLLM_WEIGHTS,
    read_heads,
    write_heads,
    write_weights,
)
from medusa_train.checkpoint.load_model import added_stop_tokens, read_stop_tokens
from medusa_train.checkpoint.medusa_layouts import (
    HeadTensors,
    method_in_path,
    shared_block_warning,
    to_vllm,
    with_own_lm_heads,
)
from medusa_train.checkpoint.resolve import (
    SAFETENSORS,
    ModelPaths,
    check_export,
    find_heads,
    heads_kind,
    holds_merged,
)
from medusa_train.checkpoint.run_directory import CONFIG, HEADS, TREE
from medusa_train.checkpoint.serialize import read_json
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError, ConfigError, MedusaError
from medusa_train.export.card import model_card
from medusa_train.export.merged_model import MERGED, load_for_export, write_merged
from medusa_train.export.server_drafts import BIAS_IGNORED, write_server_draft
from medusa_train.export.targets import (
    check_vllm_config,
    medusa_choices,
    tensorrt_config,
    write_custom_generate,
)
from medusa_train.hub import hub_is_unreachable
from medusa_train.io import WRITE_ERRORS, describe_size, make_readable, replace_text, write_failure
from medusa_train.models.loading import resolve_target_model
from medusa_train.network import check_network

#: Number of heads that the public Medusa loader builds, whatever config.json says.
PUBLIC_HEADS = 5
CARD = "README.md"
CHOICES = "medusa_choices.json"
#: Targets that store lm_head as whole matrices [V, d].
WHOLE_LM_HEADS = ("vllm", "reference", "trtllm")
#: If matrices have at least this many bytes, a line announces them before they are written.
ANNOUNCED = 256 * 2**20
#: Subdirectory of an export that has its files until all of them are complete.
UNFINISHED = ".unfinished-export"


@dataclass
class Exported:
    """An export.

    Attributes:
        target: directory of the export.
        files: directory to which files are written first. When all are complete, they are moved to
            `target`.
        facts: lines that describe the export.
        warnings: lines on what the target program will not do with it.
    """

    target: Path
    files: Path
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def export_run(
    paths: ModelPaths,
    to: ExportTarget,
    target: Path | None = None,
    *,
    target_model_name: str | None = None,
    licence: str | None = None,
    announce: Callable[[str], object] = lambda line: None,
) -> Exported:
    """Write the model at `paths` in the layout of `to`, with a model card.

    Args:
        target: output directory; defaults to export/TO next to the heads.
        target_model_name: target model to name in config.json; defaults to its absolute path or hub
            name.
        licence: licence to name on the card; defaults to the target model's.
        announce: is called with a line before anything large is written.
    """
    if paths.heads is None:
        raise CheckpointError(f"{paths.home}: holds no heads to export")
    check_export(paths.heads, to)
    place = target or paths.home / "export" / to
    if target is not None:
        _check_target(paths, to, target)
    with _published(place) as files:
        exported = Exported(place, files)
        _write(paths, to, exported, target_model_name, licence, announce)
    return exported


def _write(
    paths: ModelPaths,
    to: ExportTarget,
    exported: Exported,
    target_model_name: str | None,
    licence: str | None,
    announce: Callable[[str], object],
) -> None:
    """Write the files of an export, and add facts and warnings to `exported`."""
    # 1. Write a draft that is not Medusa, for a server.
    assert paths.heads is not None
    kind = heads_kind(paths.heads)
    name = target_model_name or _target_model_name(paths)
    if kind != "medusa":
        facts, warnings = write_server_draft(
            paths, kind, to, exported.files, exported.target, name, licence
        )
        exported.facts += facts
        exported.warnings += warnings
        if target_model_name is None:
            exported.warnings += stop_warnings(paths)
        return
    # 2. Write Medusa heads, or the target model that was trained with them.
    heads = replace(read_heads(paths.heads), target_model_name=name)
    _check_layout(paths, heads, to)
    card = model_card(paths, heads, to, licence)
    if to in WHOLE_LM_HEADS:
        announce_lm_heads(paths, heads, to, announce)
    if to == MERGED:
        _write_merged(paths, exported, card)
    elif to == "vllm":
        _write_vllm(paths, heads, exported)
    else:
        _write_heads(paths, heads, to, exported)
    # 3. Add warnings, the card and the tree.
    exported.warnings += warnings_for(to, heads)
    if to == MERGED:
        return
    exported.facts.insert(0, describe(heads))
    if target_model_name is None:
        exported.warnings += target_model_warnings(paths)
        if to != "transformers":  # the code for transformers reads the stop tokens
            exported.warnings += stop_warnings(paths)
    replace_text(exported.files / CARD, card)
    if paths.tree is not None:
        replace_text(exported.files / TREE, paths.tree.read_text(encoding="utf-8"))


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Yield a temporary directory. At the end of the block, its files replace those in `target`,
    and other model*.safetensors files in `target` are deleted.

    If an export fails or is killed, the files of an earlier export stay unchanged.

    Raises:
        CheckpointError: a write failed; the message names the directory and the free space.
    """
    temporary = target / UNFINISHED  # on the same disk as `target`
    absent = [path for path in (target, *target.parents) if not path.exists()]
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.unlink(missing_ok=True)  # a file, if an earlier version left it
    try:
        temporary.mkdir(parents=True)
        yield temporary
        make_readable(temporary)
        names = [path.name for path in temporary.iterdir()]
        for name in names:
            shutil.rmtree(target / name, ignore_errors=True)  # only directories; files are replaced
            (temporary / name).replace(target / name)
        for path in target.glob("model*.safetensors"):  # an earlier model may have had more shards
            if path.name not in names:
                path.unlink()
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)  # delete before free space is measured
        raise CheckpointError(write_failure("the export", target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in absent:
            with suppress(OSError):  # the directory is not empty, because it has the export
                path.rmdir()


def _check_target(paths: ModelPaths, to: ExportTarget, target: Path) -> None:
    """Raise CheckpointError if the export would overwrite other files than an earlier export."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"output_dir: {target} is a file, not a directory")
    input_directories = [paths.home.resolve(), Path(paths.target_model).resolve()]
    if paths.heads is not None:
        input_directories.append(paths.heads.resolve())
    if target.resolve() in input_directories or _holds_other_files(target, to):
        raise CheckpointError(
            f"output_dir: {target} holds other files that would be overwritten; name a new"
            " directory"
        )


def _holds_other_files(target: Path, to: ExportTarget) -> bool:
    """Return whether a directory has other content than an earlier export of the same kind."""
    if not target.exists() or all(path.name == UNFINISHED for path in target.iterdir()):
        return False
    if to == MERGED:
        return not holds_merged(target)
    if find_heads(target).layout in (None, "model"):
        return True
    if target.name == HEADS and (target.parent / CONFIG).is_file():  # the heads of another run
        return True
    weights = VLLM_WEIGHTS if to in ("vllm", "sglang", "speculators") else SAFETENSORS
    # vLLM reads all safetensors files in a directory
    return any(path.name != weights for path in target.glob("*.safetensors"))


def _check_layout(paths: ModelPaths, heads: HeadTensors, to: ExportTarget) -> None:
    """Raise CheckpointError if the layout of `to` cannot store all weights of the heads."""
    if heads.markov_rank and to != MERGED:
        raise CheckpointError(
            f"{paths.heads}: the guesses of these heads depend on the token before, by a Markov"
            f" bias (medusa_markov_rank: {heads.markov_rank}), which the layout of {to} cannot"
            " store and no other program computes; decode with them here (medusa-eval,"
            " medusa_train.load), or train without medusa_markov_rank"
        )
    if heads.token_map is not None and to not in ("vllm", "transformers", MERGED):
        raise CheckpointError(
            f"{paths.heads}: these heads have a draft vocabulary of {len(heads.token_map):,} tokens"
            f" (medusa_vocab_size), which the layout of {to} cannot store; export --to vllm or"
            " transformers, or train without medusa_vocab_size"
        )


def announce_lm_heads(
    paths: ModelPaths, heads: HeadTensors, to: ExportTarget, announce: Callable[[str], object]
) -> None:
    """Announce the size of the full lm_head matrices that `to` stores. In the run they may be
    shared or have a reduced vocabulary.
    """
    tokens = heads.vocab_size
    if tokens is None:
        _, config = resolve_target_model(
            paths.target_model, trust_remote_code=paths.trust_remote_code
        )
        tokens = config.get_text_config().vocab_size
    # only vLLM's layout can store one matrix for all heads
    matrices = 1 if heads.shared and to == "vllm" else heads.num_heads
    itemsize = heads.state["blocks.0.0.linear.weight"].itemsize
    size = matrices * tokens * heads.hidden_size * itemsize
    if size >= ANNOUNCED:
        noun = "matrix" if matrices == 1 else "matrices"
        announce(
            f"writing {describe_size(size)}: {to} stores {matrices} lm_head {noun} of {tokens:,}"
            " tokens"
        )


def describe(heads: HeadTensors) -> str:
    """Describe heads in one line."""
    matrix = f"V {heads.vocab_size}"
    if heads.shared:
        matrix = "the lm_head of the target model"
    if heads.token_map is not None:
        matrix += f", draft vocabulary of {len(heads.token_map):,} tokens"
    if heads.markov_rank:
        matrix += f", Markov bias of rank {heads.markov_rank}"
    blocks = f"{heads.num_layers} block{'' if heads.num_layers == 1 else 's'}"
    return (
        f"{heads.num_heads} heads x {blocks}, d {heads.hidden_size}, {matrix}; target model"
        f" {heads.target_model_name}"
    )


def warnings_for(to: ExportTarget, heads: HeadTensors) -> list[str]:
    """List what the target program will not do with these heads."""
    warnings = []
    if to not in (MERGED, "transformers") and "lm_heads.0.bias" in heads.state:
        warnings.append(BIAS_IGNORED)
    if to in ("tgi", "reference-v2") and heads.shared and heads.num_layers != 1:
        warnings.append("TGI reads heads that share lm_head only with one block each")
    if to == "reference":
        if (warning := shared_block_warning(heads)) is not None:
            warnings.append(warning)
        if heads.num_heads < PUBLIC_HEADS:
            warnings.append(
                f"the public Medusa loader always builds {PUBLIC_HEADS} heads: those beyond the"
                f" {heads.num_heads} of this run stay randomly initialized, without a warning"
            )
    return warnings


def target_model_warnings(paths: ModelPaths) -> list[str]:
    """Warn that the heads of a joint run need the target model that was trained with them."""
    if paths.adapter is None or _merged_directory(paths) is not None:
        return []
    return [
        f"this run trained the target model too ({paths.adapter}): serve these heads with the"
        f" merged target model (medusa-export {paths.home} --to merged), not with"
        f" {paths.target_model}"
    ]


def stop_warnings(paths: ModelPaths) -> list[str]:
    """Warn if answers end at a token that neither the target model's generation config nor its
    tokenizer names, because servers only stop at tokens from these files.
    """
    if _merged_directory(paths) is not None:  # its generation config has all stop tokens
        return []
    try:
        stop_tokens, tokenizer = read_stop_tokens(paths)
        file_tokens = read_stop_tokens(replace(paths, special_tokens={}))[0]
    except MedusaError:  # the target model is not on this machine
        return []
    known_tokens = file_tokens.generation_config + file_tokens.tokenizer
    unknown_tokens = [token for token in stop_tokens.ids if token not in known_tokens]
    if not unknown_tokens:
        return []
    texts = " and ".join(map(str, tokenizer.convert_ids_to_tokens(unknown_tokens)))
    return [
        f"answers end at {texts}, which neither generation_config.json nor the tokenizer of"
        f" {paths.target_model} names: add {unknown_tokens} to eos_token_id in its"
        " generation_config.json, or send stop_token_ids with each request, else servers go on"
        " after the answer"
    ]


def _target_model_name(paths: ModelPaths) -> str:
    """Return the target model with which the heads decode (the merged model if it exists), as a hub
    name or an absolute path.
    """
    if (merged := _merged_directory(paths)) is not None:
        return str(merged.resolve())
    local = Path(paths.target_model)
    if not local.is_dir():
        return paths.target_model
    return str(local.resolve())


def _merged_directory(paths: ModelPaths) -> Path | None:
    """Return the run's merged target model; None if missing or older than the adapter."""
    merged = paths.home / "export" / MERGED
    if paths.adapter is None or not (merged / "config.json").is_file():
        return None
    adapter_time = max(path.stat().st_mtime for path in paths.adapter.iterdir())
    is_older = (merged / "config.json").stat().st_mtime < adapter_time
    return None if is_older else merged


def _write_heads(
    paths: ModelPaths, heads: HeadTensors, to: ExportTarget, exported: Exported
) -> None:
    """Write Medusa heads in a layout with the public code's names."""
    # 1. Reject heads that the layout cannot store.
    if to == "reference-v2" and not heads.shared:
        raise CheckpointError(
            f"{paths.heads}: each of these heads has its own lm_head matrix, which reference-v2"
            " cannot store; train with medusa_share_lm_head: true, or export --to reference"
        )
    # 2. Prepare what is written next to the heads or into their config.json.
    config = {}
    if to == "trtllm":
        config = tensorrt_config(paths, heads.num_heads)
        choices, warning = medusa_choices(paths, heads.num_heads)
    elif to == "transformers":
        exported.facts.append(
            write_custom_generate(paths, heads.num_heads, exported.files, exported.target)
        )
        added = added_stop_tokens(paths)
        if added:
            config["stop_token_ids"] = list(added)
    # 3. Write the heads.
    if heads.shared and to in ("reference", "trtllm"):
        exported.facts.append(
            "target format cannot share lm_head: a copy of that lm_head for each head"
        )
        heads = with_own_lm_heads(heads, *_lm_head(paths, heads, exported))
    write_heads(heads, exported.files, pickled=to != "transformers", config=config)
    # 4. Write the tree for TensorRT-LLM.
    if to != "trtllm":
        return
    if warning:
        (exported.target / CHOICES).unlink(missing_ok=True)  # delete an earlier tree
        exported.warnings.append(warning)
    else:
        replace_text(exported.files / CHOICES, choices + "\n")
        exported.facts.append(f'tree: --medusa_choices="$(cat {exported.target / CHOICES})"')


def _write_vllm(paths: ModelPaths, heads: HeadTensors, exported: Exported) -> None:
    shared_weight = None
    if heads.shared:
        shared_weight, _ = _lm_head(paths, heads, exported)
    tensors, config = to_vllm(heads, shared_weight)
    check_vllm_config(config)
    write_weights(exported.files, VLLM_WEIGHTS, tensors, config)
    exported.facts.append(
        "vLLM drafts a chain of top-1 tokens (no tree): set num_speculative_tokens to 1 to"
        f" {heads.num_heads}, as measured on your server; it is fixed while the server runs"
    )
    if heads.token_map is not None:
        exported.facts.append(
            "vLLM cannot load a reduced vocabulary: the other rows are filled in so that their"
            " tokens are not drafted; a step reads whole lm_head matrices"
        )
    if (warning := path_warning(str(exported.target.resolve()))) is not None:
        exported.warnings.append(warning)


def path_warning(path: str) -> str | None:
    """Return a warning if vLLM chooses another method because of the heads' path or hub name; None
    otherwise.
    """
    method = method_in_path(path)
    if method is None:
        return None
    return (
        f"vLLM would load heads at {path} as {method}, whatever the method in --speculative-config,"
        " because of that word in the path: serve them from another path"
    )


def _lm_head(
    paths: ModelPaths, heads: HeadTensors, exported: Exported
) -> tuple[Tensor, Tensor | None]:
    """Load weight [V, d] and bias [V] of the trained target model's lm_head, on the CPU and in the
    heads' dtype.
    """
    dtype = heads.state["blocks.0.0.linear.weight"].dtype
    lm_head = load_for_export(paths).lm_head()
    weight = lm_head.weight.detach().to("cpu", dtype)
    if lm_head.bias is None:
        return weight, None
    exported.warnings.append(BIAS_IGNORED)
    return weight, lm_head.bias.detach().to("cpu", dtype)


def _write_merged(paths: ModelPaths, exported: Exported, card: str) -> None:
    is_full = paths.heads is not None and find_heads(paths.heads).layout == "model"
    if not paths.trained_target_model and not is_full:
        raise CheckpointError(
            f"{paths.home}: this run did not train the target model, so there is nothing to merge:"
            f" use {paths.target_model}"
        )
    exported.facts.append(write_merged(paths, exported.files, card))


# Upload


def push(directory: Path, repo: str, *, private: bool, api: Any = None) -> str:
    """Upload `directory` as the model repository `repo`; returns its URL."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub: {repo}: {error}") from None
    if api is None:
        if hub_is_unreachable():
            raise MedusaError(
                f"the hub can't be reached (or HF_HUB_OFFLINE is set); the export is in {directory}"
            )
        check_network()
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        url = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        # do not upload evaluations of the export, because they contain paths of this machine
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=str(directory),
            repo_type="model",
            ignore_patterns=["eval/*", "compiled/*"],
        )
    # the client raises many unrelated types: no token, no permission, no network
    except Exception as error:
        raise MedusaError(
            f"upload of {directory} to {repo} failed: {error}\nLog in with `hf auth login` (or set"
            " HF_TOKEN) with a token that has write access; the export is complete"
        ) from error
    return str(url)


def local_target_model(directory: Path) -> str | None:
    """Return the target model in config.json if it is a local path, which is invalid on other
    machines; None otherwise.
    """
    config = directory / "config.json"
    if not config.is_file():
        return None
    name = read_json(config).get("base_model_name_or_path")
    if not isinstance(name, str) or not Path(name).is_absolute():
        return None
    return name

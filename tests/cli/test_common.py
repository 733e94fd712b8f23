import errno
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.table import Table
from typer import Typer
from typer.testing import CliRunner

from medusa_train.cli.common import output_console, quiet_libraries, run_command, split_arguments
from medusa_train.cli.evaluate import app as evaluate_app
from medusa_train.cli.export import app as export_app
from medusa_train.cli.selfdistill import app as selfdistill_app
from medusa_train.cli.train import app as train_app
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.removed_keys import REMOVED_KEYS
from medusa_train.errors import ConfigError, DataError, Terminated


def run_program(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run medusa-train; print which libraries it imported."""
    code = "import sys\nfrom medusa_train.cli.train import app\ntry:\n    app()\nfinally:\n"
    code += "    print('heavy:', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, cwd=PROJECT_ROOT, env=environment, timeout=120, check=False,
    )  # fmt: skip


def test_three_mistakes_print_with_lines_exit_2_and_load_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base_model: data/tiny\nlearning_rte: 1e-3\ndatasets:\n  - path: a.jsonl\nnum_epochs:"
        " few\nadapter: qlora\n"
    )
    done = run_program(str(path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 3 problems in the configuration:",
        f"  {path}:2: learning_rte: unknown key; did you mean learning_rate?",
        f"  {path}:5: num_epochs: expected a number, got 'few'",
        (
            f"  {path}:6: adapter: 'qlora': qlora is an adapter on a 4-bit target model; "
            "set load_in_4bit: true, or adapter: lora"
        ),
    ]
    assert done.stdout == "heavy: []\n"


def test_a_good_configuration_lists_what_it_ignores_and_replaces_what_the_output_cannot_encode() -> (
    None
):
    keys = ("configs/tiny_m1.yaml", "strict=false", "output_dir=modèle", "--print-config")
    done = run_program(*keys, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "ignored keys (no effect): strict\n")
    assert "output_dir: mod?le " in done.stdout
    assert done.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (evaluate_app, "--bench"),
        (export_app, "--to"),
        (selfdistill_app, "--prompts"),
        (train_app, "--num-gpus"),
    ],
)
def test_an_option_that_is_given_twice_is_named(command: Typer, option: str) -> None:
    once = CliRunner().invoke(command, [option, "3", "absent.yaml"])
    assert "the last one counts" not in once.output
    twice = CliRunner().invoke(command, [option, "3", f"{option}=4", "absent.yaml"])
    assert f"{option} is given 2 times; the last one counts\n" in twice.output
    assert twice.exit_code != 0


@pytest.mark.parametrize(
    ("command", "words", "advice"),
    [
        (train_app, ["--base-model", "X"], "--base-model: no such option; write base_model=X"),
        (train_app, ["--learning-rate=1e-3"], "write learning_rate=1e-3"),
        (train_app, ["--eagle3.vocab-size", "9"], "write eagle3.vocab_size=9"),
        (train_app, ["--bf16", "--inspect"], "write bf16=VALUE"),
        (train_app, ["--lr", "1e-3"], "did you mean learning_rate=1e-3?"),
        (export_app, ["--model", "runs/mine"], "did you mean run=runs/mine?"),
        (train_app, ["--model", "two words"], "did you mean 'base_model=two words'?"),
        (selfdistill_app, ["--base-model", "X"], "write base_model=X"),
        (evaluate_app, ["--score", "true"], "write score=true"),
        (export_app, ["runs/mine", "--license", "mit"], "write license=mit"),
    ],
)
def test_a_key_that_is_typed_as_an_option_is_answered_with_what_to_write(
    command: Typer, words: list[str], advice: str
) -> None:
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2
    assert result.stderr.strip().removeprefix("error: ").endswith(advice), result.stderr


@pytest.mark.parametrize(
    ("app", "words", "removed"),
    [
        (train_app, ["--hostfile", "hosts"], "--hostfile"),
        (train_app, ["--master-port=29500"], "--master-port"),
        (train_app, ["--master_port=29500"], "--master-port"),
        (train_app, ["--gpu-kernels"], "gpu_kernels"),
        (train_app, ["--gpu_kernels=auto"], "gpu_kernels"),
        (selfdistill_app, ["--shard", "0/2"], "--shard"),
        (selfdistill_app, ["--dry-run"], "--dry-run"),
    ],
)
def test_an_option_or_key_of_an_earlier_version_that_is_typed_as_an_option_is_answered_with_what_to_do(
    app: Typer, words: list[str], removed: str
) -> None:
    done = CliRunner().invoke(app, ["base_model=m", *words])
    assert done.exit_code == 2
    option = words[0].partition("=")[0]
    assert done.stderr == f"error: {option}: no such option; {REMOVED_KEYS[removed]}\n"


def test_a_mistyped_option_is_answered_with_the_nearest_one() -> None:
    result = CliRunner().invoke(evaluate_app, ["--benhc", "tiny"])
    assert result.exit_code == 2
    assert "--bench" in result.stderr


def test_a_secret_that_is_typed_as_an_option_is_not_printed() -> None:
    result = CliRunner().invoke(train_app, ["--wandb-api-key", "1234567890abcdef"])
    assert result.exit_code == 2
    assert "1234567890abcdef" not in result.output


# --- exit codes ---------------------------------------------------------------------------------------------------


def exit_code(command: Callable[[], int | None]) -> int:
    try:
        run_command(command)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1
    return 0


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (lambda: None, 0, ""),
        (lambda: 130, 130, ""),
        (
            lambda: fail(DataError("data/[a].jsonl:3: no messages")),
            1,
            "data/[a].jsonl:3: no messages",
        ),
        (
            lambda: fail(DataError("word " * 99 + "word")),
            1,
            "word " * 99 + "word",
        ),  # not broken into lines
        (lambda: fail(KeyboardInterrupt()), 130, "interrupted"),
        (lambda: fail(Terminated()), 143, "terminated"),
        (
            lambda: fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
            1,
            "No space left on device",
        ),
        (
            lambda: open(f"{__file__}/out.jsonl", "wb"),  # noqa: SIM115
            1,
            f"{__file__}/out.jsonl: Not a directory",
        ),
    ],
)
def test_results_and_errors_have_exit_codes_and_a_line(
    command: Callable[[], int | None], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(command) == code
    assert capsys.readouterr() == ("", message and f"error: {message}\n")


def test_a_gpu_without_enough_memory_prints_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        exit_code(
            lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        )
        == 1
    )
    assert capsys.readouterr().err.startswith(
        "error: not enough GPU memory; a smaller batch_size or"
    )


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")], ids=repr
)
def test_a_bug_keeps_its_trace(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_command(lambda: fail(error))()


def test_names_and_paths_are_printed_as_they_are() -> None:
    console = output_console(file=io.StringIO(), width=80)
    table = Table()
    table.add_row("[/x] :b:")
    console.print(table)
    console.print("runs/[1]/[/x]:b:")
    assert isinstance(console.file, io.StringIO)
    assert "[/x] :b:" in console.file.getvalue()
    assert "runs/[1]/[/x]:b:" in console.file.getvalue()


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "path", "overrides"),
    [
        ([], None, []),
        (["configs/x.yaml"], Path("configs/x.yaml"), []),
        (
            ["seed=1", "configs/x.yaml", "datasets[0].path=a=b"],
            Path("configs/x.yaml"),
            ["seed=1", "datasets[0].path=a=b"],
        ),
        (["./a=b.yaml"], Path("./a=b.yaml"), []),
    ],
)
def test_arguments_are_a_file_and_overrides(
    arguments: list[str],
    path: Path | None,
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert split_arguments(arguments) == (path, overrides)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1.yaml").touch()
    assert split_arguments(["lr=1.yaml", "lr=2.yaml"]) == (Path("lr=1.yaml"), ["lr=2.yaml"])
    with pytest.raises(
        ConfigError, match=r"expected one configuration file, got a\.yaml and seed; overrides"
    ):
        split_arguments(["a.yaml", "seed", "x=1"])


def test_libraries_are_quiet_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATASETS_VERBOSITY", "info")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    with warnings.catch_warnings():
        quiet_libraries()
    assert os.environ["DATASETS_VERBOSITY"] == "info"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    monkeypatch.undo()


@pytest.mark.parametrize(("set_by_user", "used"), [(None, "1"), ("0", "0")])
def test_a_command_asks_for_huge_pages_unless_the_user_decided(
    set_by_user: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    seen: list[str] = []

    def command() -> None:
        seen.append(os.environ["THP_MEM_ALLOC_ENABLE"])

    run_command(command)()
    assert seen == [used]


@pytest.mark.parametrize("value", ["0", "1"])
def test_commands_ask_early_enough(value: str) -> None:
    """torch reads the variable when it allocates first: no import of a command may do that. The
    flag `hg` marks memory for which a program has asked for huge pages.
    """
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no huge pages")
    code = (
        "import os, torch, medusa_train.cli.evaluate, medusa_train.cli.train;"
        " from medusa_train.cli.common import run_command;"
        " tensors = [];"
        " run_command(lambda: tensors.append(torch.ones(64 << 20, dtype=torch.uint8)))();"
        " lines = open('/proc/self/smaps').read().splitlines();"
        " print(any('hg' in line.split() for line in lines if line.startswith('VmFlags')))"
    )
    environment = dict(os.environ)
    environment.pop("THP_MEM_ALLOC_ENABLE", None)
    if value == "0":
        environment["THP_MEM_ALLOC_ENABLE"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == str(value == "1")


def test_loaders_draw_no_bars_into_a_log() -> None:
    """Also where the hub's library is imported before a command starts."""
    code = (
        "import huggingface_hub.utils as hub; from medusa_train.cli.common import quiet_libraries;"
        " quiet_libraries(); print(hub.are_progress_bars_disabled())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "True"


def test_the_trace_of_a_known_error_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_DEBUG", "1")
    with pytest.raises(DataError):
        run_command(lambda: fail(DataError("x")))()


def test_help_names_the_values_of_options_and_none_of_switches() -> None:
    shown = CliRunner().invoke(evaluate_app, ["--help"], env={"COLUMNS": "120"}).output
    lines = {line.split()[1]: line.split()[2] for line in shown.splitlines() if "│ --" in line}
    assert lines["--limit"] == "<int>"
    assert lines["--temperature"] == "<number>"
    assert lines["--bench"] == "<text>"
    assert not lines["--calibrate"].startswith("<")
    assert not lines["--serve"].startswith("<")

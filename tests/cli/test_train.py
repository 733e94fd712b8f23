import subprocess
import sys

import pytest
from typer.testing import CliRunner

from medusa_train.cli.train import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_alone(*arguments):
    """Run the command in a process of its own; print its exit code and whether torch was imported."""
    code = (
        "import sys\n"
        "from medusa_train.cli.train import app\n"
        f"sys.argv = ['medusa-train', *{arguments!r}]\n"
        "try:\n    app()\n"
        "except SystemExit as end:\n    print('exit', end.code)\n"
        "print('torch' in sys.modules)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"base_model: {tmp_path / 'absent-model'}\n"
        f"datasets:\n  - path: {tmp_path / 'absent.jsonl'}\n"
        f"output_dir: {tmp_path / 'run'}\n"
        "medusa_only_heads: true\n"
    )
    return path


def test_the_first_lines_name_draft_target_model_data_and_output(config_file, tmp_path):
    result = run(config_file)
    assert (
        f"5 Medusa heads x 1 layer on {tmp_path / 'absent-model'}, frozen target model"
        in result.output
    )
    assert f"data: {tmp_path / 'absent.jsonl'}; output: {tmp_path / 'run'}" in result.output


def test_processes_within_one_of_several_are_refused(config_file, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run(config_file, "--num-gpus", "2")
    assert result.exit_code == 2
    assert "this one is of 2 that another launcher has started" in result.output


def test_only_one_thing_is_printed_in_place_of_training(config_file):
    result = run(config_file, "--doctor", "--inspect")
    assert result.exit_code == 2
    assert "--doctor and --inspect exclude each other" in result.output


@pytest.mark.parametrize("flags", [(), ("--print-config",), ("--num-gpus", "2")])
def test_a_number_of_tokens_does_not_start_training(config_file, flags):
    result = run(config_file, "tokens=60M", *flags)
    assert result.exit_code == 2
    assert "tokens: only --inspect reads it" in result.output


@pytest.mark.parametrize("flags", [(), ("--inspect",), ("--num-gpus", "2")])
def test_all_missing_inputs_are_reported_at_once_and_before_torch(config_file, tmp_path, flags):
    arguments = [
        str(config_file),
        "deepspeed=absent/z.json",
        f"lora_model_dir={tmp_path / 'absent-run'}",
        *flags,
    ]
    arguments.append("test_datasets=[{path: absent/t.jsonl}]")
    done = run_alone(*arguments)
    # a file of the configuration is missing, too
    assert done.stdout.split() == ["exit", "2", "False"]
    assert done.stderr[done.stderr.index("error: ") :].splitlines() == [
        "error: 5 inputs are missing:",
        f"  base_model {tmp_path / 'absent-model'}: no such directory",
        f"  datasets: {tmp_path / 'absent.jsonl'}: no such file or directory",
        "  test_datasets: absent/t.jsonl: no such file or directory",
        (
            f"  lora_model_dir: {tmp_path / 'absent-run'}: no such directory; train these heads"
            " first, or leave lora_model_dir empty to start with new ones"
        ),
        "  deepspeed: absent/z.json: no such file",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [((), 2, "already holds a run (heads)"), (("--resume",), 1, "no checkpoint to resume from")],
)
def test_an_earlier_run_is_not_lost(config_file, tmp_path, flags, code, message):
    (tmp_path / "run" / "heads").mkdir(parents=True)
    result = run(config_file, *flags)
    assert result.exit_code == code
    assert message in result.output
    assert "absent-model:" not in result.output  # refused before the inputs are looked up


def test_no_such_checkpoint(config_file):
    result = run(config_file, "resume_from_checkpoint=runs/absent/step-3")
    assert result.exit_code == 1
    assert "no such checkpoint" in result.output

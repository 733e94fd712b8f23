"""Problems in a configuration, in its files and in the first records of its data are reported before
torch is imported, which takes seconds, on some machines a minute. Then a line says so.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT

#: Runs each command in one process in which torch cannot be imported, after a pause.
SCRIPT = """
import json, sys, time
from typer.testing import CliRunner
from medusa_train import progress
progress.SILENT_SECONDS = 0.05
class Pause:
    def find_spec(self, name, *others):
        if name in ("torch", "transformers"):
            time.sleep(0.2)
            raise ImportError(name)
sys.meta_path.insert(0, Pause())
from medusa_train.cli import evaluate, export, selfdistill, train
results = {}
for name, (command, *words) in json.loads(sys.argv[1]).items():
    done = CliRunner().invoke(globals()[command].app, words)
    results[name] = [done.exit_code, done.output, repr(done.exception)]
print(json.dumps(results))
"""
TRAIN = ["train", "run.yaml"]
EVALUATE = ["evaluate", "--bench", "tiny"]
DISTILL = ["selfdistill", "--prompts", "good.jsonl"]
BAD_LINE = "bad.jsonl:2: 'messages' must be a list of turns, it is missing; the keys are text"
#: What is typed, the exit code, and a part of the message.
CASES: dict[str, tuple[list[str], int, str]] = {
    "key": ([*TRAIN, "learning_rte=1"], 2, "learning_rte: unknown key"),
    "long name": ([*TRAIN, "base_model=" + "a" * 300], 2, "longer than the name of a file can be"),
    "long name of an evaluation": ([*EVALUATE, "--model", "a" * 300], 2, "longer than the name"),
    "long name of prompts": (["selfdistill", "--prompts", "a" * 300], 2, "longer than the name"),
    "long name of an export": (["export", "a" * 300, "--to", "vllm"], 2, "longer than the name"),
    "null byte": ([*TRAIN, 'dataset_prepared_path="a\\0b"'], 2, "not UTF-8, or a null byte"),
    "directory of deepspeed": ([*TRAIN, "deepspeed=empty"], 2, "deepspeed: empty: no such file"),
    "file in place of a directory": ([*TRAIN, "output_dir=bad.jsonl"], 2, "is a file, not a"),
    "record": ([*TRAIN, "datasets.0.path=bad.jsonl"], 1, BAD_LINE),
    "record, inspected": ([*TRAIN, "datasets.0.path=bad.jsonl", "--inspect"], 1, BAD_LINE),
    "record, launched": ([*TRAIN, "datasets.0.path=bad.jsonl", "--num-gpus", "2"], 1, BAD_LINE),
    "record of test data": ([*TRAIN, "test_datasets=[{path: bad.jsonl}]"], 1, "bad.jsonl:2: "),
    "record of a directory": ([*TRAIN, "datasets.0.path=data"], 1, "data/train.jsonl:2: "),
    "record of stage one": (
        [*TRAIN, "recipe=medusa2", "stage_one.datasets=[{path: bad.jsonl}]"],
        1,
        "bad.jsonl:2: ",
    ),
    "directory without data": ([*TRAIN, "datasets.0.path=empty"], 1, "empty: no .jsonl, "),
    "public data offline": ([*TRAIN, "datasets.0.path=sharegpt"], 1, "not found locally"),
    "model": ([*TRAIN, "base_model=empty"], 1, "base_model empty: not a model directory"),
    "model of the hub": ([*TRAIN, "base_model=a/b"], 1, "run `hf download a/b --local-dir "),
    "config.json": ([*TRAIN, "base_model=damaged"], 1, "cannot read damaged/config.json"),
    "vocabulary": ([*TRAIN, "medusa_vocab_size=9999"], 2, "must be less than the 2,048 tokens"),
    "layers": (
        [*TRAIN, "recipe=medusa2", "medusa_num_unfreeze_layers=99"],
        2,
        "99 exceeds the 6 layers of data/tiny",
    ),
    "template": ([*TRAIN, "chat_template=absent.jinja"], 2, "'absent.jinja': cannot be read"),
    "initial heads": ([*TRAIN, "lora_model_dir=empty"], 1, "holds neither heads nor an adapter"),
    "deepspeed": ([*TRAIN, "deepspeed={zero: 3}"], 2, "deepspeed: zero: unknown key"),
    "batch of deepspeed": (
        [*TRAIN, "deepspeed={train_batch_size: 3}", "--num-gpus", "2"],
        2,
        "processes are 1 x 1 x 2",
    ),
    "bench": (
        ["evaluate", "--bench", "bad.jsonl", "--base-model", "data/tiny"],
        1,
        "bad.jsonl:2: ",
    ),
    "evaluated model": ([*EVALUATE, "--base-model", "damaged"], 1, "cannot read damaged/config"),
    "evaluated run": ([*EVALUATE, "--model", "absent"], 1, "model 'absent': no such directory"),
    "model of a run": ([*EVALUATE, "--model", "hydra"], 1, "(named by hydra; give another with"),
    "tree": (
        [*EVALUATE, "--base-model", "data/tiny", "--tree", "x.json"],
        1,
        "data/tiny has no heads; name a run",
    ),
    "template of an evaluation": (
        [*EVALUATE, "--base-model", "data/tiny", "chat_template=absent.jinja"],
        2,
        "'absent.jinja': cannot be read",
    ),
    "compared runs": (["evaluate", "--compare", "a", "b"], 1, "a: no such run or report"),
    "prompts": (["selfdistill", "--prompts", "bad.jsonl", "--model", "data/tiny"], 1, "bad.js"),
    "answering model": ([*DISTILL, "--model", "damaged"], 1, "cannot read damaged/config.json"),
    "template of answers": (
        [*DISTILL, "--model", "data/tiny", "--chat-template", "absent.jinja"],
        2,
        "'absent.jinja': cannot be read",
    ),
    "exported run": (["export", "empty", "--to", "vllm"], 1, "empty: neither a run"),
    "export of a draft": (["export", "hydra", "--to", "vllm"], 1, "no layout for it"),
    "layout of an export": (["export", "eagle3", "--to", "tgi"], 1, "vllm, sglang, speculators"),
}
#: Commands without a problem, up to torch.
WAITING: dict[str, list[str]] = {
    "train": TRAIN,
    "inspect": [*TRAIN, "--inspect"],
    "launch": [*TRAIN, "--num-gpus", "2"],
    "evaluate": [*EVALUATE, "--base-model", "data/tiny"],
    "calibrate": [*EVALUATE, "--model", "eagle3", "--base-model", "data/tiny", "--calibrate"],
    "chat": ["evaluate", "--base-model", "data/tiny", "--interactive"],
    "compare": ["evaluate", "--compare", "report.json", "report.json"],
    "selfdistill": [*DISTILL, "--model", "data/tiny"],
    "selfdistill in a given dtype": [*DISTILL, "--model", "data/tiny", "dtype=float32"],
    "export": ["export", "eagle3", "--to", "vllm"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and exception of each case."""
    place = tmp_path_factory.mktemp("before_torch")
    chat = {"messages": [{"role": role, "content": "Hi"} for role in ("user", "assistant")]}
    (place / "good.jsonl").write_text(json.dumps(chat) + "\n")
    (place / "bad.jsonl").write_text(json.dumps(chat) + '\n{"text": "x"}\n')
    for name in ("data", "empty", "damaged"):
        (place / name).mkdir()
    (place / "data" / "train.jsonl").write_text((place / "bad.jsonl").read_text())
    (place / "damaged" / "config.json").write_text("{")
    (place / "run.yaml").write_text(
        "base_model: data/tiny\ndatasets: [{path: good.jsonl, type: messages}]\noutput_dir: out\n"
    )
    for draft in ("hydra", "eagle3"):
        heads = place / draft / "heads"
        heads.mkdir(parents=True)
        (place / draft / "config.yaml").write_text("base_model: ./moved\n")
        (heads / "draft.safetensors").touch()
        (heads / "config.json").write_text(json.dumps({"draft": draft}))
    (place / "report.json").write_text("{}")
    typed = WAITING | {name: words for name, (words, _, _) in CASES.items()}
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(typed)],
        cwd=place, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, tuple[int, str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_reported_without_torch(
    case: str, results: dict[str, tuple[int, str, str]]
) -> None:
    _, code, message = CASES[case]
    found, output, exception = results[case]
    assert message in output, exception
    assert found == code


@pytest.mark.parametrize("command", WAITING)
def test_a_command_that_waits_for_torch_says_so(
    command: str, results: dict[str, tuple[int, str, str]]
) -> None:
    _, output, exception = results[command]
    assert "Error" in exception, "torch was not imported"
    said = r"^(importing torch.*|loading the (model|tokenizer)): 0 s so far$"
    assert re.search(said, output, re.MULTILINE), output


def test_records_after_the_first_hundred_are_left_to_the_run(tmp_path: Path) -> None:
    from medusa_train.config.schema import DatasetConfig
    from medusa_train.data.read_chats import check_first_records

    chat = '{"instruction": "Hi", "output": "Ho"}\n'
    path = tmp_path / "long.jsonl"
    path.write_text(chat * 100 + "{}\n")
    check_first_records([DatasetConfig(path=str(path))], skip_bad=False)


def test_variables_of_a_chat_template_wait_for_the_template(tmp_path: Path) -> None:
    """Which names it has is known once the tokenizer is loaded."""
    from medusa_train.config.schema import DatasetConfig
    from medusa_train.data.read_chats import check_first_records

    record = {
        "instruction": "Hi",
        "output": "Ho",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record) + "\n")
    check_first_records([DatasetConfig(path=str(path))], skip_bad=False)


@pytest.mark.parametrize("text", ["", "\n", "[]"])
def test_a_data_set_without_records_is_reported(text: str, tmp_path: Path) -> None:
    from medusa_train.config.schema import DatasetConfig
    from medusa_train.data.read_chats import check_first_records
    from medusa_train.errors import DataError

    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"chats\.json: no conversation to read: no records"):
        check_first_records([DatasetConfig(path=str(path))], skip_bad=False)

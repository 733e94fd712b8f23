import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from medusa_train.cli.selfdistill import app
from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig, TrainConfig
from medusa_train.data import sources
from medusa_train.errors import DataError
from medusa_train.hub import FetchError
from medusa_train.selfdistill import prompts as distill_prompts
from tests.evaluation.tiny_model import write_run, write_target_model
from tests.fake_server import Reply, error, serving

runner = CliRunner()
SHORT = ["temperature=0", "dtype=float32", "max_new_tokens=6", "drop_truncated=false"]


def succeed(words: list[str]) -> Result:
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    return result


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target model and a file of seeds."""
    home = tmp_path_factory.mktemp("workplace")
    write_target_model(home / "backbone")
    seeds = [
        {"id": f"s{n}", "turns": [f"question {n}", "and more?"][: n % 2 + 1]} for n in range(4)
    ]
    (home / "mine.jsonl").write_text(
        "".join(json.dumps(seed) + "\n" for seed in seeds), encoding="utf-8"
    )
    return home


@pytest.fixture
def at_work(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def test_seeds_are_answered_and_a_second_run_goes_on(at_work: Path) -> None:
    flags = ["--seed", "mine.jsonl", "--model", "backbone", *SHORT]
    result = succeed([*flags, "--limit", "2"])
    out = at_work / "runs" / "selfdistill" / "mine.jsonl"
    assert (
        "model backbone, prompts mine.jsonl; output runs/selfdistill/mine.jsonl"
        in result.output.splitlines()[0]
    )
    two = out.read_text(encoding="utf-8")
    assert [json.loads(line)["id"] for line in two.splitlines()] == ["s0", "s1"]

    result = succeed(flags)
    assert "resuming after 2 conversations" in result.output
    assert out.read_text(encoding="utf-8").startswith(two)
    last = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    assert last["model"] == "backbone"
    assert [message["role"] for message in last["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert last["sampling"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_new_tokens": 6,
        "seed": 42,
        "dtype": "float32",
    }

    result = runner.invoke(app, [*flags, "seed=1", "--chat-template", "zephyr"])
    assert result.exit_code == 2
    assert "seed: 42 in the file, 1 now" in result.output
    assert "chat_template: None in the file, 'zephyr' now" in result.output


def test_a_run_that_kept_nothing_fails_each_time_it_is_started(at_work: Path) -> None:
    flags = ["--seed", "mine.jsonl", "--model", "backbone", *SHORT, "--output", "nothing.jsonl"]
    for _ in range(2):
        result = runner.invoke(app, [*flags, "drop_truncated=true", "max_new_tokens=1"])
        assert result.exit_code == 1
        assert "no answer was kept, so there is no file" in result.output
        assert "4 length: set max_new_tokens above 1, or drop_truncated=false" in result.output
        assert "nothing.dropped.jsonl lists those" in result.output
        assert "complete" not in result.output


def test_prompts_that_a_server_lost_are_counted_and_asked_again(at_work: Path) -> None:
    good = '{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
    blank = '{"choices": [{"message": {"content": " "}, "finish_reason": "stop"}]}'

    def script(number: int, body: dict) -> Reply:
        if body["messages"][0]["content"] == "question 0":
            return 200, {}, good.encode()
        if body["messages"][0]["content"] == "question 1":
            return error(400, "no such role")
        return 200, {}, blank.encode()

    words = ["--seed", "mine.jsonl", "--model", "m", "--output", "lost.jsonl", "concurrency=1"]
    with serving(script) as server:
        result = succeed([*words, "--server-url", server.url])
    output = " ".join(result.output.split())
    assert "warning: 3 of 4 prompts have no kept answer" in output
    assert "2 empty: the server sent no text" in output
    assert "1 refused: the server rejected them" in output
    assert "the same command asks 3 prompts again" in output
    assert ".dropped.jsonl" not in output
    with serving(lambda n, body: (200, {}, good.encode())) as server:
        output = succeed([*words, "--server-url", server.url]).output
    assert len(server.bodies) == 5  # the prompts s1 and s3 have two turns
    assert "warning" not in output
    assert len(read(at_work / "lost.jsonl")) == 4


def test_a_server_that_sends_only_empty_answers_fails_the_run(at_work: Path) -> None:
    blank = b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}'
    words = ["--seed", "mine.jsonl", "--model", "m", "--output", "blank.jsonl"]
    for _ in range(2):
        with serving(lambda n, body: (200, {}, blank)) as server:
            result = runner.invoke(app, [*words, "--server-url", server.url])
        assert len(server.bodies) == 4
        assert result.exit_code == 1
        assert "4 empty: the server sent no text" in result.output
    assert not list(at_work.glob("blank*"))


def test_answers_that_came_as_reasoning_are_reported_with_what_to_set(at_work: Path) -> None:
    def script(number: int, body: dict) -> Reply:
        message: dict[str, str | None] = {"content": "four"}
        if body["messages"][-1]["content"] == "question 2":
            message = {"content": None, "reasoning_content": "four"}
        choice = {"message": message, "finish_reason": "stop"}
        return 200, {}, json.dumps({"choices": [choice]}).encode()

    words = ["--seed", "mine.jsonl", "--model", "m", "--output", "thought.jsonl"]
    with serving(script) as server:
        output = " ".join(succeed([*words, "--server-url", server.url]).output.split())
    assert "1 only reasoning: the text came as reasoning (`reasoning_content`)" in output
    assert "chat_template_kwargs={enable_thinking: false}" in output
    assert "the same command asks 1 prompt again" in output
    assert len(read(at_work / "thought.jsonl")) == 3


def test_an_unknown_finish_reason_is_counted_and_the_other_answers_stay(at_work: Path) -> None:
    def script(number: int, body: dict) -> Reply:
        finish = "stop"
        if body["messages"][-1]["content"] == "question 2":
            finish = "insufficient_system_resource"
        choice = {"message": {"content": "yes"}, "finish_reason": finish}
        return 200, {}, json.dumps({"choices": [choice]}).encode()

    words = ["--seed", "mine.jsonl", "--model", "m", "--output", "unknown.jsonl"]
    with serving(script) as server:
        output = succeed([*words, "--server-url", server.url]).output
    assert "'insufficient_system_resource'" in output
    (line,) = [line for line in output.splitlines() if "unknown finish_reason" in line]
    assert line.split()[-2] == "1"  # before the border of the table
    assert "the same command asks 1 prompt again" in output
    assert len(read(at_work / "unknown.jsonl")) == 3


@pytest.mark.parametrize("finish", [None, "stop"])
def test_answers_that_may_be_cut_are_dropped_unless_truncated_ones_are_kept(
    at_work: Path, finish: str | None
) -> None:
    def script(number: int, body: dict) -> Reply:
        choice = {"message": {"content": "half an"}, "finish_reason": finish}
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        return 200, {}, json.dumps({"choices": [choice], "usage": usage}).encode()

    words = ["--seed", "mine.jsonl", "--model", "m", "--server-url"]
    with serving(script) as server:
        result = runner.invoke(app, [*words, server.url, f"output=cut-{finish}.jsonl"])
        kept = [f"output=cut-{finish}-kept.jsonl", "drop_truncated=false"]
        succeed([*words, server.url, *kept])
    assert result.exit_code == 1
    assert "4 possibly cut: the server does not say that they are whole" in result.output
    lines = read(at_work / f"cut-{finish}-kept.jsonl")
    assert [line["finish_reasons"][0] for line in lines] == ["possibly cut"] * 4


def test_models_in_directories_of_the_same_name_are_told_apart(
    at_work: Path, tmp_path: Path
) -> None:
    flags = ["--seed", "mine.jsonl", "--output", "same.jsonl", "limit=1", *SHORT, "--model"]
    for parent in "ab":
        write_target_model(tmp_path / parent / "hf")
    (tmp_path / "b" / "hf" / "more.bin").write_bytes(b"1")
    succeed([*flags, str(tmp_path / "a" / "hf")])
    succeed([*flags, str(tmp_path / "a" / "hf")])
    result = runner.invoke(app, [*flags, str(tmp_path / "b" / "hf")])
    assert result.exit_code == 2
    assert "generated with other settings\n  weights: " in result.output


def test_broken_records_are_named_and_skipped_on_request(at_work: Path) -> None:
    (at_work / "bad.jsonl").write_text('{"turns": ["Say it."]}\n{"turns": 5}\n', encoding="utf-8")
    flags = ["--seed", "bad.jsonl", "--model", "backbone", *SHORT]
    result = runner.invoke(app, flags)
    assert result.exit_code == 1
    assert "bad.jsonl:2: 'turns' must be a list" in result.output
    result = succeed([*flags, "skip_bad_records=true"])
    assert "bad.jsonl:2: 'turns' must be a list" in result.output
    assert "skipped prompts: 1 broken" in result.output


def test_an_odd_record_of_a_public_data_set_is_skipped(
    at_work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats: list[object] = [{"conversations": None}]
    chats.append({"conversations": [{"from": "human", "value": "hello"}]})
    (at_work / "sharegpt.json").write_text(json.dumps(chats), encoding="utf-8")
    monkeypatch.setenv(sources.SEED_DIR_VARIABLE, str(at_work))
    words = ["--prompts", "sharegpt", "--model", "backbone", "--output", "odd.jsonl"]
    result = succeed([*words, *SHORT])
    assert "record 1: 'conversations' must be a list of turns" in result.output
    assert "skipped prompts: 1 broken" in result.output


def test_a_yaml_gives_the_keys_and_no_machine_path_is_written(at_work: Path) -> None:
    (at_work / "sd.yaml").write_text(
        f"seed_dataset: {at_work}/mine.jsonl\nbase_model: {at_work}/backbone\ndtype:"
        " float32\nmax_new_tokens: 4\ntemperature: 0.7\ndrop_truncated: false\noutput:"
        " never.jsonl\nchat_template: zephyr\n"
    )
    succeed(["sd.yaml", "--output", "out/sampled.jsonl", "limit=1"])
    assert not (at_work / "never.jsonl").exists()
    for path in (at_work / "out").iterdir():
        assert str(at_work) not in path.read_text(encoding="utf-8"), path
    assert (
        json.loads((at_work / "out" / "sampled.jsonl").read_text(encoding="utf-8"))["model"]
        == "backbone"
    )


def test_a_missing_data_set_says_where_to_put_it(
    at_work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise FetchError("no network")

    monkeypatch.setattr(sources, "fetch_dataset_file", refuse)
    result = runner.invoke(app, ["--seed", "sharegpt", "--model", "backbone"])
    assert result.exit_code == 1
    assert "to data/seeds/sharegpt.json (JSON Lines" in " ".join(result.output.split())
    assert not (at_work / "runs" / "selfdistill" / "sharegpt.jsonl").exists()


def test_only_its_own_prompts_are_answered_by_the_test_model(at_work: Path) -> None:
    result = succeed(["--prompts", "tiny", "--output", "tiny.jsonl", "limit=1", *SHORT])
    assert "data/tiny (the embedded test model), prompts tiny" in result.output.splitlines()[0]
    for words in (["--prompts", "sharegpt"], ["--seed", "mine.jsonl", "--mode", "selftalk"]):
        result = runner.invoke(app, words)
        assert result.exit_code == 2
        assert "needs the answering model: add --model NAME" in result.output
        assert "medusa-selfdistill: model" not in result.output


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_training_yaml_gets_the_command_that_makes_its_data(
    at_work: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = runner.invoke(app, [str(path)])
    assert result.exit_code == 2
    head, *commands = result.output.splitlines()
    assert "is a configuration of medusa-train. To make data for it:" in head
    assert commands
    read = []

    def stop(cfg: SelfDistillConfig, progress: object) -> None:
        read.append(cfg)
        raise DataError("the command is valid")

    monkeypatch.setattr(distill_prompts, "load_prompts", stop)
    # configurations for any model have none
    model = yaml.safe_load(path.read_text(encoding="utf-8"))["base_model"] or "MODEL"
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "medusa-selfdistill"
        assert "the command is valid" in runner.invoke(app, words).output
        assert read.pop().base_model == model


def test_commands_for_a_training_yaml_are_built_from_its_keys(at_work: Path) -> None:
    (at_work / "train.yaml").write_text(
        "# medusa-selfdistill --prompts x --model other\n"
        "base_model: my models/a\nchat_template_kwargs: {enable_thinking: false}\n"
        "datasets:\n  - path: a b.jsonl\n    conversation: zephyr\n  - {path: u, split: test}\n"
    )
    lines = runner.invoke(app, ["train.yaml", "limit=1"]).output.splitlines()
    shared = """'chat_template_kwargs={"enable_thinking": false}'"""
    assert lines[1:] == [
        "  medusa-selfdistill --prompts 'a b.jsonl' --model 'my models/a' --chat-template zephyr"
        f" --output data/selfdistill/train_1.jsonl {shared}",
        "  medusa-selfdistill --prompts u --model 'my models/a'"
        f" --output data/selfdistill/train_2.jsonl split=test {shared}",
    ]


@pytest.mark.parametrize("data", ["", "[3]", "[{x: 1}]", "{path: null}"])
def test_a_training_yaml_with_odd_data_gets_a_command_too(at_work: Path, data: str) -> None:
    (at_work / "odd.yaml").write_text(f"base_model: m\ndatasets: {data}\nchat_template: {{a: 1}}\n")
    lines = runner.invoke(app, ["odd.yaml"]).output.splitlines()
    assert lines[1].startswith("  medusa-selfdistill --prompts ")
    assert lines[1].endswith(" --model m --output data/selfdistill/odd.jsonl")


def test_the_last_line_is_the_command_that_uses_the_output(at_work: Path) -> None:
    write_run(at_work / "whole", at_work / "backbone")
    words = ["--seed", "mine.jsonl", *SHORT, "limit=1", "--chat-template", "zephyr"]
    for model in (["--model", "backbone"], ["--model", "whole"], ["heads=whole"]):
        output = f"for{len(model)}{model[-1][-5:]}.jsonl"
        for _ in range(2):
            last = succeed([*words, *model, "--output", output]).stdout.splitlines()[-1]
            command = f"'datasets=[{{path: {output}, type: messages}}]' chat_template=zephyr"
            assert last.startswith("next: medusa-train configs/any_m1.yaml base_model=")
            assert last.endswith(f"backbone {command}")
        arguments = shlex.split(last.removeprefix("next: "))
        config = load_config(TrainConfig, Path(arguments[1]), arguments[2:])
        assert config.datasets[0].path == output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["temprature=1"], 2, "did you mean temperature"),
        (["--seed", "mine.jsonl", "engine=openai"], 2, "set server_url, for example"),
        (
            ["--seed", "mine.jsonl", "--server-url", "http://127.0.0.1:1/v1"],
            2,
            "set base_model to the name",
        ),
        (
            ["--server-url", "http://h/v1", "--model", "m", "--mode", "selftalk"],
            2,
            "requires engine: local",
        ),
        (["--mode", "questions"], 2, "the model no longer writes its own prompts"),
        (
            ["--seed", "absent.jsonl", "--model", "backbone"],
            1,
            "absent.jsonl: no such file, and no public data set of that name",
        ),
        (
            ["--seed", "mine.jsonl", "--model", "./absent", "--output", "new.jsonl"],
            1,
            "no such directory",
        ),
        (
            ["--seed", "mine.jsonl", "--model", "backbone", "--output", "x.txt"],
            2,
            "has to end with .jsonl",
        ),
    ],
)
def test_mistakes_end_with_their_code_and_a_message(
    at_work: Path, arguments: list[str], code: int, message: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())


def test_ctrl_c_keeps_what_is_done_and_exits_130(
    at_work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_train.selfdistill.local import HFEngine

    answer, asked = HFEngine.next, []

    def interrupted(self: HFEngine) -> object:
        asked.append(self)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self)

    monkeypatch.setattr(HFEngine, "next", interrupted)
    result = runner.invoke(
        app, ["--seed", "mine.jsonl", "--model", "backbone", "--output", "cut.jsonl", *SHORT]
    )
    assert result.exit_code == 130
    assert "run the same command again" in result.output
    assert len((at_work / "cut.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_self_talk_writes_both_roles(at_work: Path) -> None:
    flags = [
        "--seed",
        "mine.jsonl",
        "--model",
        "backbone",
        "--output",
        "talk.jsonl",
        "--mode",
        "selftalk",
        "limit=1",
    ]
    flags += ["dtype=float32"]
    succeed([*flags, "rounds=2", "temperature=1", "max_new_tokens=40", "drop_truncated=false"])
    record = json.loads((at_work / "talk.jsonl").read_text(encoding="utf-8"))
    assert record["mode"] == "selftalk"
    assert [message["role"] for message in record["messages"]][:2] == ["user", "assistant"]


def test_a_run_answers_with_its_target_model_and_its_heads_speculate(at_work: Path) -> None:
    write_run(at_work / "fast", at_work / "backbone")
    flags = ["--seed", "mine.jsonl", *SHORT]
    result = succeed([*flags, "heads=fast", "--output", "fast.jsonl"])
    assert "model backbone with the heads of fast" in result.output.splitlines()[0]
    assert "tokens per step" in result.output
    succeed([*flags, "--model", "backbone", "--output", "slow.jsonl"])
    assert (at_work / "fast.jsonl").read_bytes() == (at_work / "slow.jsonl").read_bytes()
    assert json.loads((at_work / "fast.settings.json").read_text())["heads"] == "fast"
    succeed([*flags, "--model", "fast", "--output", "run.jsonl"])
    made = read(at_work / "run.jsonl")
    assert {record["model"] for record in made} == {"fast"}
    assert [record["messages"] for record in made] == [
        record["messages"] for record in read(at_work / "slow.jsonl")
    ]
    missing = runner.invoke(app, [*flags, "heads=nowhere"])
    assert missing.exit_code == 1
    assert "no such directory" in missing.output


CHILD = (
    "import sys\nfrom medusa_train.cli.selfdistill import app\nsys.argv[0] ="
    " 'medusa-selfdistill'\napp()"
)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_nothing_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    """SIGKILL at no particular moment, three times, while a server answers many requests at a time."""
    count = 150
    seeds = [
        {"id": f"s{n}", "turns": [f"question {n}", "and more?"][: n % 2 + 1]} for n in range(count)
    ]
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps(seed) + "\n" for seed in seeds), encoding="utf-8"
    )
    out = tmp_path / "out.jsonl"
    kills = 0
    with serving(lambda n, body: too_long(body), seconds=0.02) as server:
        flags = [
            "--seed",
            "mine.jsonl",
            "--server-url",
            server.url,
            "--model",
            "m",
            "--output",
            "out.jsonl",
        ]
        command = [sys.executable, "-c", CHILD, *flags, "concurrency=8"]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        while kills < 3:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
            )
            asked, wait = len(server.bodies), random.Random(kills).uniform(0.0, 0.15)
            while len(server.bodies) == asked and process.poll() is None:
                time.sleep(0.005)
            time.sleep(wait)
            process.kill()
            process.wait(timeout=60)
            kills += 1
            if kills == 2 and out.exists():
                # as a kill within a write leaves it
                out.write_bytes(out.read_bytes() + b'{"id": "torn')
        subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
        )
        served = len(server.bodies)
    written = read(out)
    dropped = [
        json.loads(line)["id"] for line in (tmp_path / "out.dropped.jsonl").read_text().splitlines()
    ]
    assert sorted([record["id"] for record in written] + dropped) == sorted(
        f"s{n}" for n in range(count)
    )
    assert dropped
    for record in written:
        number = int(record["id"][1:])
        assert len(record["messages"]) == 2 * (number % 2 + 1)
        assert record["messages"][1]["content"] == f"answer to question {number}"
    assert served < 1.5 * count + 3 * 8 * 2  # only what was under way at a kill is asked again


def too_long(body: dict) -> Reply:
    """Every tenth question is refused, so that conversations are dropped as well."""
    question = body["messages"][0]["content"]
    message = "This model's maximum context length is 64 tokens."
    return error(400, message) if question.endswith("7") else None


def test_an_edited_prompt_file_is_refused(at_work: Path) -> None:
    words = ["--seed", "edited.jsonl", "--model", "backbone", "--output", "kept.jsonl", *SHORT]
    for text in ("one", "other"):
        (at_work / "edited.jsonl").write_text(
            json.dumps({"id": "a", "turns": [text]}) + "\n", encoding="utf-8"
        )
        result = runner.invoke(app, words)
    assert (result.exit_code, "a asks 'one', and now 'other'" in result.output) == (2, True)
    result = runner.invoke(app, [*words, "min_chars=100"])
    assert (
        result.exit_code,
        "no prompts are left (1 short)" in " ".join(result.output.split()),
    ) == (1, True)


def test_print_config_shows_every_value_and_runs_nothing(at_work: Path) -> None:
    example = str(CONFIGS / "examples/selfdistill.yaml")
    result = runner.invoke(app, [example, "--print-config", "--model", "MODEL"])
    assert result.exit_code == 0, result.output
    lines = {line.split(":")[0]: line for line in result.stdout.splitlines()}
    assert set(lines) == set(SelfDistillConfig.model_fields)
    assert lines["base_model"].startswith("base_model: MODEL ")
    assert lines["sample"].endswith("selfdistill.yaml:7")
    assert not (at_work / "data.jsonl").exists()

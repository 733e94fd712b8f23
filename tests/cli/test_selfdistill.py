from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_train.cli.selfdistill import app
from medusa_train.selfdistill import seeds as seeds_module
from tests.evaluation.tiny_model import write_backbone

runner = CliRunner()
SHORT = ["temperature=0", "dtype=float32", "max_new_tokens=6", "drop_truncated=false"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a backbone and a file of seeds."""
    home = tmp_path_factory.mktemp("workplace")
    write_backbone(home / "backbone")
    seeds = [{"id": f"s{n}", "turns": [f"question {n}", "and more?"][: n % 2 + 1]} for n in range(4)]
    (home / "mine.jsonl").write_text("".join(json.dumps(seed) + "\n" for seed in seeds), encoding="utf-8")
    return home


@pytest.fixture
def at_work(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def test_seeds_are_answered_and_a_second_run_goes_on(at_work: Path) -> None:
    flags = ["--seed", "mine.jsonl", "--model", "backbone", *SHORT]
    result = runner.invoke(app, [*flags, "--limit", "2"])
    assert result.exit_code == 0, result.output
    out = at_work / "runs" / "selfdistill" / "mine.jsonl"
    assert "model backbone, seeds mine.jsonl; output runs/selfdistill/mine.jsonl" in result.output.splitlines()[0]
    two = out.read_text(encoding="utf-8")
    assert [json.loads(line)["id"] for line in two.splitlines()] == ["s0", "s1"]

    result = runner.invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "holds 2 conversations already" in result.output
    assert out.read_text(encoding="utf-8").startswith(two)
    last = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    assert last["model"] == "backbone"
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "user", "assistant"]
    assert last["sampling"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_new_tokens": 6,
        "seed": 42,
        "dtype": "float32",
    }

    result = runner.invoke(app, [*flags, "seed=1", "--chat-template", "zephyr"])
    assert result.exit_code == 2
    assert "seed: 42 there, 1 now" in result.output
    assert "chat_template: None there, 'zephyr' now" in result.output


def test_a_yaml_gives_the_keys_and_no_machine_path_is_written(at_work: Path) -> None:
    (at_work / "sd.yaml").write_text(
        f"seed_dataset: {at_work}/mine.jsonl\nbase_model: {at_work}/backbone\ndtype: float32\nmax_new_tokens: 4\n"
        "temperature: 0.7\ndrop_truncated: false\noutput: never.jsonl\nchat_template: zephyr\n"
    )
    result = runner.invoke(app, ["sd.yaml", "--output", "out/sampled.jsonl", "limit=1"])
    assert result.exit_code == 0, result.output
    assert not (at_work / "never.jsonl").exists()
    for path in (at_work / "out").iterdir():
        assert str(at_work) not in path.read_text(encoding="utf-8"), path
    assert json.loads((at_work / "out" / "sampled.jsonl").read_text(encoding="utf-8"))["model"] == "backbone"


def test_without_a_model_the_embedded_backbone_is_named_and_a_missing_set_says_where_to_put_it(
    at_work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds_module, "file_from_hub", lambda repo, filename: None)
    result = runner.invoke(app, ["--seed", "sharegpt"])
    assert result.exit_code == 1
    assert "data/tiny (the embedded tiny backbone), seeds sharegpt" in result.output.splitlines()[0]
    assert "put it at data/seeds/sharegpt.json" in " ".join(result.output.split())
    assert not (at_work / "runs" / "selfdistill" / "sharegpt.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["temprature=1"], 2, "did you mean temperature"),
        (["--seed", "absent.jsonl"], 1, "no such file, and no seed set of that name"),
        (["--seed", "mine.jsonl", "--model", "./absent", "--output", "new.jsonl"], 1, "no such directory"),
        (["--seed", "mine.jsonl", "--model", "backbone", "--output", "x.txt"], 2, "has to end with .jsonl"),
    ],
)
def test_mistakes_end_with_their_code_and_a_message(
    at_work: Path, arguments: list[str], code: int, message: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())


def test_ctrl_c_keeps_what_is_done_and_exits_130(at_work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_train.selfdistill.engines import LocalEngine

    answer, asked = LocalEngine.answer, []

    def interrupted(self, messages, seed):
        asked.append(seed)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self, messages, seed)

    monkeypatch.setattr(LocalEngine, "answer", interrupted)
    flags = ["--seed", "mine.jsonl", "--model", "backbone", "--output", "cut.jsonl", *SHORT]
    result = runner.invoke(app, flags)
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert len((at_work / "cut.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_help_and_config_errors_load_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom medusa_train.cli.selfdistill import app\n"
        "run = CliRunner().invoke\n"
        "assert run(app, ['--help']).exit_code == 0\nassert run(app, ['limitt=2']).exit_code == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

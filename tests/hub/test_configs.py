"""Every shipped configuration trains as it stands, and the README's commands run one after another,
on a stand-in hub.

Overridden are only `max_steps`, `output_dir`, more than two micro-batches of a step, and `base_model`
where it is empty. What a CPU lacks falls back by itself, with a note: 8-bit AdamW. The data that
self-distillation would write, and the model of `make smollm2-model`, lie in the working directory.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from medusa_train.config.paths import PROJECT_ROOT
from tests.hub.commands import Commands
from tests.hub.content import write_hub, write_local_data
from tests.hub.server import serve

pytestmark = [pytest.mark.slow]

VICUNA = "lmsys/vicuna-7b-v1.5"
#: Configurations that differ from the one of SmolLM2 with the same ending, which is tried, in names
#: and numbers alone; half a minute each.
ALIKE = {f"qwen25_coder_{kind}" for kind in ("05b_hydra", "05b_m2_qlora", "15b_eagle3", "15b_m1")}
CONFIGS = [
    path for path in sorted((PROJECT_ROOT / "configs").glob("*.yaml")) if path.stem not in ALIKE
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    place = tmp_path_factory.mktemp("place")
    write_hub(place / "hub")
    write_local_data(place)
    with serve(place / "hub") as hub:
        commands = Commands(place, hub.environment | {"HF_HOME": str(place / "home")})
        yield commands
        commands.close()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_trains(commands: Commands, config: Path) -> None:
    keys = yaml.safe_load(config.read_text(encoding="utf-8"))
    two_stages = "stage_one" in keys
    overrides = ["max_steps=2", *(["stage_one.max_steps=2"] if two_stages else [])]
    for stage, values in (("", keys), ("stage_one.", keys.get("stage_one", {}))):
        if values.get("gradient_accumulation_steps", 1) > 2:
            overrides.append(f"{stage}gradient_accumulation_steps=2")
    if keys["base_model"] is None:
        overrides.append("base_model=Qwen/Qwen3-8B")
    seconds, output = commands.run(
        "medusa-train", f"configs/{config.name}", f"output_dir=runs/{config.stem}", *overrides
    )
    run = commands.place / "runs" / config.stem
    for stage in [run, run / "stage_one"] if two_stages else [run]:
        assert (stage / "heads" / "config.json").is_file(), output
        assert json.loads((stage / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
    assert (run / "stage_one").is_dir() == two_stages
    with (commands.place / "seconds.txt").open("a") as file:
        file.write(f"{config.stem} {seconds:.1f}\n")


def test_the_commands_of_the_readme(commands: Commands) -> None:
    chats = "answers.jsonl"
    commands.run(
        *("medusa-selfdistill", "--seed", "sharegpt", "--model", VICUNA, "--output", chats),
        "--chat-template",
        "vicuna_v1.1",
        "drop_truncated=false",
        "max_new_tokens=64",
    )
    answers = [
        json.loads(line)
        for line in (commands.place / chats).read_text(encoding="utf-8").splitlines()
    ]
    assert {answer["model"] for answer in answers} == {VICUNA}
    _, output = commands.run(
        "medusa-train",
        "configs/vicuna7b_m2.yaml",
        "output_dir=runs/mine",
        "val_set_size=0.3",
        *(
            f"datasets=[{{path: {chats}, type: messages, conversation: vicuna_v1.1}}]",
            "max_steps=2",
            "gradient_accumulation_steps=2",
        ),
        "stage_one.max_steps=2",
        "stage_one.gradient_accumulation_steps=2",
    )
    run = commands.place / "runs" / "mine"
    assert (run / "tree.json").is_file(), output
    _, output = commands.run("medusa-eval", "--bench", "mtbench", "--model", "runs/mine")
    report = json.loads((run / "eval" / "mtbench" / "report.json").read_text(encoding="utf-8"))
    assert report["overall"]["answers"] == 8, output
    commands.run("medusa-export", "runs/mine", "--to", "vllm")
    assert (
        json.loads((run / "export" / "vllm" / "config.json").read_text(encoding="utf-8"))[
            "model_type"
        ]
        == "medusa"
    )

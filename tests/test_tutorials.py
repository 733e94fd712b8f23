"""The commands of a tutorial run one after another, with the built-in model and little of everything."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT
from tests.hub.commands import Commands
from tests.test_docs import COMMANDS, MODULES

pytestmark = pytest.mark.slow

#: What makes a command short.
SHORT = {
    "medusa-selfdistill": ["limit=12", "max_new_tokens=32", "drop_truncated=false"],
    "medusa-train": ["max_steps=2", "val_set_size=0.3", "calibration_tokens=60"],
    "medusa-eval": ["--limit", "2", "max_new_tokens=8", "exactness=false"],
    "medusa-export": [],
}
#: Words of commands that need a terminal, vLLM, or the coder.
CODER = "models/qwen2.5-coder-0.5b-instruct"
LEFT_OUT = {"--interactive", "--serve", "TREE.json", CODER, f"base_model={CODER}"}
#: Tools in the system turn, and calls in the answer, with the tokens of the built-in model.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands in a directory that has what the tutorial assumes: a model and chats."""
    shutil.copytree(PROJECT_ROOT / "data" / "tiny", tmp_path / "MODEL")
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    agents = [
        [
            {"role": "user", "content": f"Is it dry in Oslo on day {day}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "assistant", "content": "No, it rains."},
        ]
        for day in range(12)
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    write_lines(tmp_path / "agent.jsonl", [{"tools": tools, "messages": m} for m in agents])
    sums = [f"A box has {count} pens. How many have 5 boxes?" for count in range(2, 18)]
    answer = {"role": "assistant", "content": "The boxes have five times as many pens."}
    chats = [[{"role": "user", "content": text}, answer] for text in sums]
    write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats[4:]])
    write_lines(tmp_path / "questions.jsonl", [{"messages": messages} for messages in chats[:4]])
    running = Commands(tmp_path, {"HF_HUB_OFFLINE": "1"})
    yield running
    running.close()


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def run_page(commands: Commands, name: str, *training: str) -> None:
    """Run the commands of a page; `training`: further overrides of keys in training."""
    pages = [words for page, words in COMMANDS if page == name and words[0] in MODULES]
    assert pages
    for words in pages:
        if not LEFT_OUT.intersection(words):
            more = training if words[0] == "medusa-train" else ()
            commands.run(*words, *SHORT[words[0]], *more)


def test_agents_with_tools(commands: Commands) -> None:
    (commands.place / "MODEL" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    # the built-in model has fewer tokens than the draft vocabulary of large models
    overrides = ("eagle3.vocab_size=", "gradient_accumulation_steps=1")
    run_page(commands, "tutorials/agents-with-tools.md", *overrides)
    assert (commands.place / "runs/agent/eval/tools/report.html").is_file()
    assert (commands.place / "runs/agent/export/vllm/model.safetensors").is_file()


def test_the_demo(commands: Commands) -> None:
    run_page(commands, "tutorials/demo.md", "datasets=chats.jsonl")
    assert (commands.place / "runs/demo/eval/tiny/report.html").is_file()


def test_your_own_chats(commands: Commands) -> None:
    # the last command of the page is for a larger model
    overrides = ("eagle3.vocab_size=", "gradient_accumulation_steps=1", "sequence_len=512")
    run_page(commands, "tutorials/your-own-chats.md", *overrides)
    assert (commands.place / "runs/mine/eval/questions/report.html").is_file()
    assert (commands.place / "runs/mine/export/vllm/model.safetensors").is_file()

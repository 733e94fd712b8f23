"""The commands that sweep acceptance rules and hold trees against decoding, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import acceptance_sweep
import pytest
import torch
import trees
from machine import facts
from torch.nn.functional import cross_entropy

from medusa_train.checkpoint.subject import Subject, load_subject, locate
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.conversation import Message
from tests.evaluation.tiny_model import write_backbone, write_run


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    home = tmp_path_factory.mktemp("home")
    run = write_run(home / "run", write_backbone(home / "backbone"))
    return load_subject(locate(str(run), None, None), "float32")


def prompts(count: int) -> list[list[int]]:
    return [
        [1, *torch.randint(3, 300, (6,), generator=torch.Generator().manual_seed(n)).tolist()] for n in range(count)
    ]


def test_loss_is_that_of_the_answer_alone(subject: Subject) -> None:
    prompt, answer = [1, 50, 60], [70, 80]
    with torch.no_grad():
        logits = subject.backbone.model(torch.tensor([prompt + answer])).logits[0, 2:4]
    wanted = cross_entropy(logits, torch.tensor(answer), reduction="sum")
    assert acceptance_sweep.answer_loss(subject, prompt, answer) == pytest.approx(float(wanted), rel=1e-5)


def test_every_rule_answers_and_is_reported(subject: Subject, tmp_path: Path) -> None:
    tallies = acceptance_sweep.sweep(subject, prompts(2), 12, 0.7)
    assert len(tallies) == 2 + len(acceptance_sweep.EPSILONS)
    assert all(tally.rate >= 1.0 and tally.perplexity > 1.0 for tally in tallies)
    acceptance_sweep.write(tallies, facts(acceptance_sweep.__file__, []), "A sweep", tmp_path)
    record = json.loads((tmp_path / "acceptance_sweep.json").read_text())
    assert [rule["epsilon"] for rule in record["rules"]] == [None, None, *acceptance_sweep.EPSILONS]
    assert (tmp_path / "acceptance_sweep.md").read_text().count("\n| typical") == len(acceptance_sweep.EPSILONS)
    assert "<svg" in (tmp_path / "acceptance_sweep.html").read_text()


def test_trees_are_expected_and_decoded_on_different_conversations(subject: Subject, tmp_path: Path) -> None:
    talks = [[prompt] for prompt in prompts(12)]
    simulated, rows = trees.measure(subject, talks, budget=200, limit=24)
    assert [one.search for one in simulated] == ["joint", "independent", "dense", "chain"]
    assert [row.nodes for row in rows] == [8, 16, 32, 63]
    assert all(row.low <= row.measured <= row.high for row in rows)
    text = trees.write(simulated, rows, facts(trees.__file__, []), "Trees", tmp_path)
    assert "Joint below independent at" in text
    assert "`python benchmarks/trees.py`" in text
    assert set(json.loads((tmp_path / "trees.json").read_text())["expected"]) == {one.search for one in simulated}
    assert "<svg" in (tmp_path / "trees.html").read_text()


def test_conversations_of_a_file_leave_out_those_of_another(subject: Subject, tmp_path: Path) -> None:
    def write(name: str, *turns: str) -> Path:
        records = [{"id": turn, "conversations": [{"from": "human", "value": turn}]} for turn in turns]
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    class Chat:
        def prompt(self, messages: list[Message]) -> list[int]:
            return [len(messages[0].content)]

    fresh, known = write("fresh.jsonl", "a", "bb", "ccc"), write("known.jsonl", "bb")
    chat = cast(ChatEncoder, Chat())
    assert trees.talks_of_files(fresh, None, chat) == [[[1]], [[2]], [[3]]]
    assert trees.talks_of_files(fresh, known, chat) == [[[1]], [[3]]]

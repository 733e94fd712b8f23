"""The tiny backbone's corpus, wording, tokenizer, template and checkpoints; a whole build in miniature."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import build
import corpus
import phrasing
import polish
import pytest
import torch
import vocabulary
from check import Answer, judge, loops
from lookahead import AHEAD, DECAY, DRAWN, Lookahead
from polish import judge_answer, repeated, signed_losses
from training import Recipe, Run, held_out_losses, hidden_states, micro_batches, to_tensors, token_losses
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabulary import Encoded

PROBLEM = {
    "question": "Ada has 3 boxes of 12 pencils.\nHow many pencils is that?",
    "answer": "There are 3*12=<<3*12=36>>36 pencils.\n#### 36",
}
MODULE = '''
class Box:
    @staticmethod
    def label(self, text: str = "x", *rest, size=3, **more):
        """Return the label of the box.

        A second paragraph.
        """
        def inner():
            """Doc inside."""
            return 1
        return text * size

def undocumented(a):
    return a

def empty():
    """Do nothing at all."""
'''


def test_calculator_marks_go_and_the_result_becomes_a_sentence() -> None:
    assert corpus.clean_answer(PROBLEM["answer"]) == "There are 3*12=36 pencils.\nThe answer is 36."


def test_functions_lose_docstrings_and_decorators_and_keep_their_code() -> None:
    (function,) = corpus.functions_in(MODULE)
    assert function.name == "label"
    assert function.signature == "label(self, text: str='x', *rest, size=3, **more)"
    assert function.bare_signature == "label(self, text, *rest, size, **more)"
    assert function.description == "Return the label of the box."
    assert function.is_method
    tree = ast.parse(function.answer)
    assert '"""' not in function.answer
    assert "Doc inside" not in function.answer
    assert isinstance(tree.body[0], ast.FunctionDef)
    assert not tree.body[0].decorator_list


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return x, e.g. 3. More text.", "Return x, e.g. 3."),
        ("Return the\n   longest one\n\nMore.", "Return the longest one"),
        ("Too short.", ""),
        (">>> f(1) is the first thing here", ""),
    ],
)
def test_first_sentence(docstring: str, sentence: str) -> None:
    assert corpus.first_sentence(docstring) == sentence


@pytest.mark.parametrize(
    ("description", "clause"),
    [
        ("Return the sum of x.", "returns the sum of x"),
        ("Matches a pattern", "matches a pattern"),
        ("Copy all files.", "copies all files"),
        ("The number of files.", None),
    ],
)
def test_descriptions_become_clauses(description: str, clause: str | None) -> None:
    assert phrasing.as_clause(description) == clause


def test_requests_come_in_many_wordings_and_always_name_the_function() -> None:
    (function,) = corpus.functions_in(MODULE)
    rng = Random(0)
    asked = {phrasing.phrase_function(function, rng) for _ in range(2000)}
    assert all("label" in text for text in asked)
    assert len({text.replace("`", "").split("label")[0] for text in asked}) >= 25


def test_long_chats_reach_their_length_with_three_turns() -> None:
    (function,) = corpus.functions_in(MODULE)
    items = [function, corpus.Problem("How many?", "The answer is 3.")] * 5
    lengths = [700, 90] * 5
    chats = corpus.long_chats(items, lengths, 20_000, Random(1))
    assert len(chats) >= 5
    for chat in chats:
        assert len(chat) == 3
        size = sum(700 * answer.count("def label") + 90 * answer.count("The answer is") for _, answer in chat)
        assert size >= corpus.LONG_CHAT


def test_every_document_comes_once_an_epoch_and_the_split_is_stable() -> None:
    items = [corpus.Problem(f"Question {n}?", f"The answer is {n}.") for n in range(500)]
    chats = corpus.short_chats(items, Random(2))
    assert sorted(answer for chat in chats for _, answer in chat) == sorted(item.answer for item in items)
    assert {len(chat) for chat in chats} == {1, 2, 3}
    held_out = [item for item in items if corpus.is_held_out(item)]
    assert 2 <= len(held_out) <= 40
    assert held_out == [item for item in reversed(items) if corpus.is_held_out(item)][::-1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tokenizer trained on this file's own text."""
    path = tmp_path_factory.mktemp("tokenizer")
    text = [MODULE, *PROBLEM.values(), "Add 12 and 345 and 6789."] * 3
    vocabulary.save_tokenizer(vocabulary.train_tokenizer(text, 400), path)
    return path


def test_digits_stand_alone_and_text_survives(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("12 and 345", add_special_tokens=False).input_ids
    assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).strip().isdigit()] == list("12345")
    for text in (MODULE, " leading", "trailing \n\n", "ünïcode → 漢字\t"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def test_the_generation_mask_is_the_answers_and_their_end(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": " def f():\n    return 3\n"},
        {"role": "user", "content": " again "},
        {"role": "assistant", "content": "3"},
    ]
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = rendered["input_ids"], rendered["assistant_masks"]
    assert ids.count(tokenizer.bos_token_id) == 1
    chosen = [i for i, marked in zip(ids, mask, strict=True) if marked]
    assert tokenizer.decode(chosen) == " def f():\n    return 3\n</s>3</s>"
    turns = [(messages[1]["content"], messages[2]["content"]), (messages[3]["content"], messages[4]["content"])]
    (ours,) = vocabulary.encode_chats(tokenizer.backend_tokenizer, [turns])
    plain = tokenizer.apply_chat_template(messages[1:], return_dict=True, return_assistant_tokens_mask=True)
    assert ours.ids == plain["input_ids"]
    assert [int(marked) for marked in ours.assistant] == plain["assistant_masks"]
    prompt = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<s><|user|>Add 1 and 2.</s><|assistant|>"
    start = tokenizer(prompt, add_special_tokens=False).input_ids
    assert start == ours.ids[: len(start)]
    assert ours.assistant[len(start) - 1 : len(start) + 1] == [False, True]


TINY = Recipe(
    steps=6, hidden=32, head_dim=16, layers=2, intermediate=48, vocabulary=64, micro_batch=64, warmup=2, brief_steps=2
)


def chats(count: int, seed: int = 0) -> list[Encoded]:
    """Random chats of 5 to 20 tokens."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        size = rng.randint(5, 20)
        made.append(Encoded([rng.randrange(3, 64) for _ in range(size)], [i > 3 for i in range(size)]))
    return made


def test_padding_changes_no_loss() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    torch.nn.init.normal_(run.model.model.layers[0].mlp.down_proj.weight, std=0.5)
    pair = [Encoded(list(range(3, 11)), [True] * 8), Encoded(list(range(20, 23)), [True] * 3)]
    ids, kinds = to_tensors(pair, torch.device("cpu"))
    together = token_losses(run.model, hidden_states(run.model, ids), ids)
    short, _ = to_tensors(pair[1:], torch.device("cpu"))
    alone = token_losses(run.model, hidden_states(run.model, short), short)
    assert kinds[1].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    torch.testing.assert_close(together[1, :2], alone[0])


def test_micro_batches_hold_every_chat_once_within_the_limit() -> None:
    made = chats(50)
    batches = micro_batches(made, 64, Random(0))
    assert sorted(id(chat) for batch in batches for chat in batch) == sorted(map(id, made))
    assert all(len(batch) * max(len(chat.ids) for chat in batch) <= 64 for batch in batches)


def test_the_held_out_loss_counts_each_token_once() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    made = chats(9)
    rows = [torch.tensor([chat.ids]) for chat in made]
    expected = sum(float(token_losses(run.model, hidden_states(run.model, row), row).detach().sum()) for row in rows)
    measured = held_out_losses(run.model, made, 64)["all"] * sum(len(chat.ids) - 1 for chat in made)
    assert measured == pytest.approx(expected, rel=5e-3)  # bf16 autocast against float32


def test_the_lookahead_is_the_weighted_loss_of_tokens_further_on() -> None:
    torch.manual_seed(0)
    blocks = Lookahead(8)
    for block in blocks.blocks:
        torch.nn.init.normal_(block.weight)
    unembed = torch.nn.Linear(8, 32, bias=False)
    hidden, ids, weights = torch.randn(2, 9, 8), torch.randint(32, (2, 10)), torch.rand(2, 9)
    expected = {}
    for ahead in range(1, AHEAD + 1):
        expected[ahead] = 0.0
        for row in range(2):
            for t in range(9 - ahead):
                h = hidden[row, t]
                log_p = unembed(h + torch.nn.functional.silu(blocks.blocks[ahead - 1](h))).log_softmax(-1)
                loss = -float(log_p[ids[row, t + 1 + ahead]].detach())
                expected[ahead] += DECAY**ahead * loss * float(weights[row, t + ahead])
    drawn = Random(5).sample(range(1, AHEAD + 1), DRAWN)
    found = blocks.losses(hidden, unembed, ids, weights, Random(5)).detach()
    assert float(found) == pytest.approx(sum(expected[k] for k in drawn) * AHEAD / DRAWN, rel=1e-4)
    many = [float(blocks.losses(hidden, unembed, ids, weights, Random(seed)).detach()) for seed in range(300)]
    assert sum(many) / len(many) == pytest.approx(sum(expected.values()), rel=0.05)


def test_the_lookahead_teaches_the_model_and_is_not_part_of_it() -> None:
    def after_a_step(weight: float) -> Run:
        run = Run(replace(TINY, lookahead_weight=weight, lookahead_from=0.0), Path("absent"), torch.device("cpu"))
        for number in range(3):  # the model's output projections start at zero
            run.update([chats(4, number)])
        return run

    with_it, without = after_a_step(1.0), after_a_step(0.0)
    assert any(block.weight.abs().sum() > 0 for block in with_it.lookahead.blocks)
    assert not any(block.weight.any() for block in without.lookahead.blocks)
    assert not torch.equal(with_it.model.lm_head.weight, without.model.lm_head.weight)
    assert not any("lookahead" in name for name in with_it.model.state_dict())


def test_a_run_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    class Stop(Exception):
        """Stands for a power cut."""

    def train(checkpoint: Path, stop_at: int | None) -> Run:
        run = Run(TINY, checkpoint, torch.device("cpu"))
        saved: list[int] = []

        def on_checkpoint(model: object) -> None:
            saved.append(run.step)
            if run.step == stop_at:
                raise Stop

        try:
            run.train(
                lambda number: chats(12, number),
                lambda number: chats(12, 50 + number),
                {"some": chats(3)},
                print,
                3,
                on_checkpoint,
            )
        except Stop:
            assert saved == [3]
        return run

    whole = train(tmp_path / "whole.safetensors", None)
    assert train(tmp_path / "part.safetensors", 3).step == 3
    resumed = train(tmp_path / "part.safetensors", None)
    assert resumed.step == 6
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_the_rate_warms_up_stays_and_ends_at_zero_after_polishing() -> None:
    recipe = Recipe(steps=1000, warmup=10, flat=0.4, polish_rate=0.2, polish_rounds=50)
    assert [recipe.rate(step) for step in (0, 9, 400)] == [0.1, 1.0, 1.0]
    assert recipe.rate(700) == pytest.approx(0.6)
    assert recipe.rate(999) == pytest.approx(0.2, abs=2e-3)
    assert recipe.rate(1000) == pytest.approx(0.2)
    assert recipe.rate(1025) == pytest.approx(0.2)
    assert recipe.rate(1049) == pytest.approx(0.2 / 25)


def test_tokens_that_go_on_a_loop_are_marked() -> None:
    once = list(range(8))
    assert not any(repeated([*once, 99, *once[:7]]))
    assert repeated(once + once) == [False] * 8 + [True] * 8  # 8 tokens twice: the whole second time
    assert not any(repeated(once + once, polish.CODE_SPANS))
    assert repeated(once * 3, polish.CODE_SPANS) == [False] * 8 + [True] * 16  # in code, three times
    assert any(repeated([1, 2, 3, 4, 11, 1, 2, 3, 4, 12, 1, 2, 3, 4, 13, 1, 2, 3, 4, 14, 1, 2, 3, 4]))


def test_unlikelihood_pushes_down_what_was_chosen_where_there_was_a_choice() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0], [9.0, 0.0, -1.0], [1.0, 0.0, -1.0], [1.0, 0.0, 2.0]]], requires_grad=True)
    ids = torch.tensor([[2, 0, 0, 1, 2]])
    sign = torch.tensor([[1.0, -1.0, -1.0, 2.0, 0.0]])
    losses = signed_losses(logits, ids, sign)
    p = logits.detach().softmax(-1)[0]
    choice = (1 - p[:2, 0]) ** 2 + 1e-4
    share = choice / choice.sum()
    assert share[0] > 0.99  # the second token was certain
    rest = torch.log1p(-p[:2, 0].clamp(max=1 - 1e-4))
    expected = torch.stack([-share[0] * rest[0], -share[1] * rest[1], -2 * torch.log(p[2, 1]), torch.tensor(0.0)])
    torch.testing.assert_close(losses[0], expected)
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 2, 1]
    assert not logits.grad[0, 3].any()


def test_answers_are_judged_and_nothing_but_loops_and_hasty_ends_is_unlearned(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer

    def judged(text: str, is_code: bool) -> tuple[list[float], set[str], list[str]]:
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 1]
        weights, kinds = judge_answer(tokenizer, ids, is_code)
        return weights, kinds, [tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    weights, kinds, _ = judged("def f(a):\n    if a = 2:\n        return a", True)
    assert kinds == {"broken_code", "short"}
    assert not any(weights)
    weights, kinds, pieces = judged("One line.\nThe answer is 3.", False)
    assert kinds == {"short"}
    assert weights[pieces.index("\n") + 1] == -polish.SHORT_WEIGHT
    varied = "def f(a):\n" + "".join(f"    {name} = {name}{name}({value})\n" for value, name in enumerate("bcghklm"))
    weights, kinds, _ = judged(varied, True)
    assert kinds == {"good"}
    assert set(weights) == {polish.GOOD_WEIGHT}
    weights, kinds, _ = judged("x = 1\n" * 20, True)
    assert kinds == {"looping"}
    assert min(weights) == -polish.CODE_WEIGHT
    weights, kinds, _ = judged("So it is 3 + 4 = 7 in all.\n" * 9, False)
    assert kinds == {"looping"}
    assert min(weights) == -polish.LOOP_WEIGHT


def test_the_model_settles_beyond_the_mean_of_its_last_states() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    weight = run.model.lm_head.weight

    def become(value: float) -> None:
        with torch.no_grad():
            weight.fill_(value)

    polish.settle(run)
    become(1.0)
    run.keep("unpolished")
    become(2.0)
    run.keep("mean", 1.0)
    become(4.0)
    run.keep("mean", 0.5)
    polish.settle(run)
    assert torch.allclose(weight, torch.tensor(1.0 + polish.REACH * 2.0))


def test_figures_see_loops_repeats_and_broken_code() -> None:
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    good = Answer("coding", "q", list(range(60)), "def f():\n    return 1", True)
    bad = Answer("coding", "q", [1] * 256, "def f(", False)
    figures = judge([good, good, bad, Answer("math", "q", [1, 2], "not code (", True)])
    assert (figures.ended, figures.looping, figures.distinct, figures.parsing) == (0.75, 0.25, 0.75, 2 / 3)
    assert figures.median_tokens == 60


def test_a_build_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "train.jsonl"
    rows = [PROBLEM | {"question": f"Ada has {n} boxes. How many are that?"} for n in range(80)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--gsm8k",
        str(source),
        "--smoke",
        "--work",
        str(tmp_path / "work"),
        "--every",
        "2",
        "--polish",
        "1",
        "--steps",
    ]
    assert build.main([*command, "2"]) == 0
    assert build.main([*command, "4"]) == 0  # goes on
    assert "from step 3" in capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 3, 4, 5]
    made = tmp_path / "work" / "model"
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(made).eos_token_id
    readme = (made / "README.md").read_text()
    assert "Apache-2.0" in readme
    assert "perplexity per byte" in readme
    with pytest.raises(SystemExit, match="another seed"):
        build.main([*command, "6", "--seed", "1"])


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps(PROBLEM) + "\n{}\n")
    with pytest.raises(SystemExit, match=r"train\.jsonl, line 2"):
        corpus.read_problems(source)

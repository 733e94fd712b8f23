"""Steps on fixed memory give the tokens and accepted paths of the loop; replayed as well as run."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.cuda_graphs import (
    CudaGraphRunner,
    FixedShapeRunner,
    GraphRunner,
    Replayable,
    Step,
    graph_runner,
    graph_unsupported_reason,
)
from medusa_train.inference.fixed_steps import FixedShapeSteps
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KEY_BLOCK, KVCache
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.tape import TapeRunner
from tests.inference.test_drafts import REPLAYED_KINDS, TREE, random_draft

BLOCK = 16  # of the cache: answers cross several of its borders
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], list(range(2, 23))]


def answers(
    target_model: TargetModel,
    draft: Proposer | None = None,
    tree: Tree | None = None,
    rule: AcceptanceRule = Greedy(),
) -> list[Generation]:
    """Answer all prompts with one decoder, whose buffers serve one after the other."""
    kv_cache = KVCache(target_model.num_layers, 120, BLOCK)
    decoder = Decoder(target_model, draft, tree, kv_cache)
    return [
        decoder.generate(prompt, 24, (), rule, torch.Generator().manual_seed(5))
        for prompt in PROMPTS
    ]


def paths(generations: Sequence[Generation]) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens, one.accepted) for one in generations]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", ["plain", *REPLAYED_KINDS])
def test_steps_give_the_tokens_and_paths_of_the_loop(kind: str, family: str) -> None:
    target_model = random_target_model(family)
    if kind == "plain":
        expected = answers(target_model)
        target_model.step_runner = FixedShapeRunner()
        assert paths(answers(target_model)) == paths(expected)
        return
    draft = random_draft(kind, target_model)
    with draft.no_early_exit():
        expected = answers(target_model, draft, TREE)
    target_model.step_runner = FixedShapeRunner()
    assert paths(answers(target_model, draft, TREE)) == paths(expected)
    assert sum(sum(one.accepted) for one in expected) > 3  # paths were compacted


@pytest.mark.parametrize(
    ("kind", "family"), [("plain", "gemma3"), *((kind, "llama") for kind in REPLAYED_KINDS)]
)
def test_replayed_steps_give_the_same(kind: str, family: str) -> None:
    """What is replayed repeats the operations of the first step with its shapes, addresses and
    numbers.
    """
    target_model = random_target_model(family)
    draft, tree = (None, None) if kind == "plain" else (random_draft(kind, target_model), TREE)
    target_model.step_runner = FixedShapeRunner()
    expected = answers(target_model, draft, tree)
    runner = target_model.step_runner = TapeRunner()
    assert paths(answers(target_model, draft, tree)) == paths(expected)
    # one per number of columns that attention reads: 16, 32, 48, and 64 for nodes after the last
    # position
    assert runner.captures == (3 if kind == "plain" else 4)


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.from_paths([(0,)])], ids=["chain", "single"])
@pytest.mark.parametrize("kind", REPLAYED_KINDS)
def test_other_trees(kind: str, tree: Tree) -> None:
    target_model = random_target_model("llama")
    draft = random_draft(kind, target_model)
    with draft.no_early_exit():
        expected = answers(target_model, draft, tree)
    target_model.step_runner = TapeRunner()
    assert paths(answers(target_model, draft, tree)) == paths(expected)


def test_plain_decoding_and_trees_share_a_cache() -> None:
    """As in the measurement of step latencies, where they take turns."""
    target_model = random_target_model("llama")
    draft = random_draft("hydra++", target_model)
    expected = [answers(target_model, draft, tree) for tree in (TREE, Tree.chain(2))]
    target_model.step_runner = TapeRunner()
    kv_cache = KVCache(target_model.num_layers, 120, BLOCK)
    decoders = [
        Decoder(target_model, draft, tree, kv_cache) for tree in (TREE, Tree.chain(2), Tree.empty())
    ]
    for i, prompt in enumerate(PROMPTS):
        trees = [decoder.generate(prompt, 24, ()) for decoder in decoders]
        assert paths(trees[:2]) == paths([one[i] for one in expected])
        assert trees[2].tokens == expected[0][i].tokens
        assert trees[2].accepted == [0] * 23


def test_a_decoder_allocates_its_own_cache_and_a_larger_one_where_needed() -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    expected = Decoder(target_model, draft, TREE).generate(PROMPTS[0], 30).tokens
    target_model.step_runner = TapeRunner()
    decoder = Decoder(target_model, draft, TREE)
    target_model.max_context = 64
    first = decoder.generate(PROMPTS[0], 30).tokens
    target_model.max_context = 64 + 2 * KEY_BLOCK
    decoder.generate(PROMPTS[0], 64 + KEY_BLOCK, [first[3]])
    assert first == decoder.generate(PROMPTS[0], 30).tokens == expected


def move_weights(target_model: TargetModel, draft: Proposer | None, by: str) -> None:
    """Move weights and change their values, and leave the old memory unusable."""
    if by == "draft":
        assert isinstance(draft, torch.nn.Module)
        weight = max(draft.parameters(), key=torch.Tensor.numel)
    else:
        weight = target_model.model.get_output_embeddings().weight
    old = weight.data
    generator = torch.Generator().manual_seed(3)
    new = torch.randn(old.shape, dtype=old.dtype, generator=generator)
    if by == "assigned":
        target_model.model.get_output_embeddings().weight = torch.nn.Parameter(new, False)
    else:
        weight.data = new
    old.fill_(torch.nan)


@pytest.mark.parametrize("by", ["data", "assigned", "draft"])
def test_no_replay_reads_weights_that_have_moved(by: str) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    runner = target_model.step_runner = TapeRunner()
    kv_cache = KVCache(target_model.num_layers, 120, BLOCK)
    decoder = Decoder(target_model, draft, TREE, kv_cache)
    before = decoder.generate(PROMPTS[0], 24, ())
    count = runner.captures
    assert paths([decoder.generate(PROMPTS[0], 24, ())]) == paths([before])
    assert runner.captures == count  # nothing has moved: all steps are replayed
    move_weights(target_model, draft, by)
    after = decoder.generate(PROMPTS[0], 24, ())
    assert runner.captures > count
    target_model.step_runner = FixedShapeRunner()
    assert paths([after]) == paths(
        [Decoder(target_model, draft, TREE).generate(PROMPTS[0], 24, ())]
    )
    assert by == "draft" or after.tokens != before.tokens


@pytest.mark.parametrize(
    ("rule", "kept"), [(Greedy(), False), (Typical(0.8), True)], ids=["greedy", "typical"]
)
def test_logits_are_copied_for_rules_that_read_them(rule: AcceptanceRule, kept: bool) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    expected = answers(target_model, draft, TREE, rule)
    target_model.step_runner = TapeRunner()
    decoder = Decoder(target_model, draft, TREE, KVCache(target_model.num_layers, 120, BLOCK))
    first = decoder.generate(PROMPTS[0], 24, (), rule)
    assert isinstance(decoder._steps, FixedShapeSteps)
    assert (decoder._steps._logits is not None) is kept
    assert paths([first]) == paths(expected[:1])
    # both kinds of step take turns on the same memory
    decoder.generate(PROMPTS[0], 24, (), Typical(0.8) if isinstance(rule, Greedy) else Greedy())
    assert paths([decoder.generate(PROMPTS[0], 24, (), rule)]) == paths([first])


@pytest.mark.parametrize("rule", [Greedy(), Typical(0.8)], ids=["greedy", "typical"])
def test_what_is_captured_beforehand_is_what_the_rule_replays(rule: AcceptanceRule) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    runner = target_model.step_runner = TapeRunner()
    decoder = Decoder(target_model, draft, TREE, KVCache(target_model.num_layers, 120, BLOCK))
    decoder.generate(PROMPTS[1], 2, (), rule)  # allocates the memory
    decoder.capture(64, rule)
    before = runner.captures
    decoder.generate(PROMPTS[0], 24, (), rule)
    assert runner.captures == before > 1


class FailingRunner(GraphRunner):
    """Its captures fail as those of an operation that waits for the device."""

    warm_ups, failure = 0, "operation not permitted when stream is capturing\nCompile with ..."

    def _warm_up(self, step: Step) -> None:
        self.warm_ups += 1
        step()

    def _capture(self, step: Step) -> Replayable:
        raise RuntimeError(f"CUDA error: {self.failure}")


def test_where_capture_fails_steps_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("hydra", target_model)
    expected = answers(target_model, draft, TREE)
    runner = target_model.step_runner = FailingRunner()
    with caplog.at_level(logging.INFO):
        assert paths(answers(target_model, draft, TREE)) == paths(expected)
    assert runner.warm_ups == 1
    assert caplog.text.count("capture failed") == 1
    assert "not permitted when stream is capturing" in caplog.text
    runner = target_model.step_runner = FailingRunner()
    runner.failure = "out of memory"  # each capture is tried, and each step runs
    assert paths(answers(target_model, draft, TREE)) == paths(expected)
    assert (runner.works, runner.warm_ups > 1) == (True, True)


def test_a_failed_capture_closes_the_allocators_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `empty_cache` fails from then on."""
    device, closed = torch.device("cuda", 3), Mock()
    for name in ("Stream", "CUDAGraph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: Mock(device_index=device.index)
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", closed, raising=False)

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphRunner(device)._capture(fails)
    closed.assert_called_once_with(3, (0, 7))


@pytest.mark.parametrize(
    ("family", "unsupported_reason"),
    [("llama", None), ("gemma3", None), ("phi3-longrope", "rotary")],
)
def test_models_that_cannot_be_captured(
    family: str, unsupported_reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    target_model = random_target_model(family)
    found = graph_unsupported_reason(target_model.model)
    assert found is None if unsupported_reason is None else unsupported_reason in str(found)
    target_model.config.num_experts = 4
    assert graph_unsupported_reason(target_model.model) is not None
    assert graph_runner(torch.device("cpu"), target_model.model) is None
    assert "no CUDA graphs" not in caplog.text
    with caplog.at_level(logging.INFO):
        assert graph_runner(torch.device("cuda"), target_model.model) is None
    assert "no CUDA graphs" in caplog.text
    target_model.config.num_experts = None
    target_model.model.is_quantized = True
    assert graph_unsupported_reason(target_model.model) is not None
    target_model.model.config.quantization_config = Mock(load_in_4bit=True)
    assert graph_unsupported_reason(target_model.model) == found

"""Early-exit drafting: plain decoding's tokens, first layers run once per token, the paper's chains
and their ends.
"""

from io import StringIO
from itertools import count
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import DraftStep, Proposal
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.progress import RunProgress
from medusa_train.tree_search.time_steps import QUICK, time_steps
from medusa_train.trees.levels import Level
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import check_equals_plain
from tests.inference.steps import begun
from tests.inference.test_drafts import PROMPTS

TREES = {
    "chain": Tree.chain(5),
    "wide": Tree.cartesian([3, 2, 2]),
    "sparse": Tree.from_paths(
        [(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (0, 0, 0, 1), (1, 0, 2)]
    ),
}


def settled(family: str, first: int = 1, sharpness: float = 1.0) -> TargetModel:
    """A random model whose later layers add little, so that an early exit is often right and
    sometimes wrong.
    """
    target_model = random_target_model(family)
    with torch.no_grad():
        target_model.output_embeddings.weight.mul_(sharpness)
        for layer in target_model.body.layers[first:]:
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.mul_(0.25)
                if (
                    name.startswith(("post_attention_layernorm", "post_feedforward_layernorm"))
                    and family == "olmo2"
                ):
                    parameter.mul_(0.25)
    return target_model


def early_exit(
    target_model: TargetModel, kind: type[KangarooDraft] = KangarooDraft, **settings: Any
) -> Any:
    """A draft that predicts about what the target model would predict without its later layers."""
    draft = kind.from_target_model(target_model, **{"exit_layer": 1, "threshold": 0.0, **settings})
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.adapter.body.layers.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
        draft.adapter.body.norm.load_state_dict(target_model.body.norm.state_dict())
    return draft


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_single_rows_and_batches_equal_plain_decoding(
    family: str, tree: str, threshold: float
) -> None:
    target_model = settled(family)
    alone, together = check_equals_plain(
        target_model, early_exit(target_model, threshold=threshold), PROMPTS, TREES[tree], 30
    )
    # guesses were accepted, so their states were moved and read again
    assert all(out.steps < 25 for out in alone)
    # rows differ, so that the comparison can fail
    assert len({tuple(out.accepted) for out in together}) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_losslessly(family: str) -> None:
    target_model = settled(family)
    draft = early_exit(target_model, exit_layer=2, threshold=0.2)
    alone, _ = check_equals_plain(target_model, draft, PROMPTS, Tree.cartesian([9, 4, 1]), 20)
    assert sum(sum(out.accepted) for out in alone) > 10


class Recorder(KangarooDraft):
    """Records the logits at each root, and the proposals."""

    log: list[tuple[list[int], Tensor]]
    proposals: list[Proposal]
    logits_of_step: list[Tensor]

    def logits(self, states: Tensor) -> Tensor:
        self.logits_of_step.append(super().logits(states))
        return self.logits_of_step[-1]

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        self.logits_of_step = []
        self.proposals.append(super().propose(step, states))
        lengths = step.accepted.lengths.tolist()
        self.log.append((lengths, self.logits_of_step[0][:, 0].clone()))
        return self.proposals[-1]


def recorder(target_model: TargetModel, **settings: Any) -> Recorder:
    draft = early_exit(target_model, Recorder, **settings)
    draft.log, draft.proposals = [], []
    return draft


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_incremental_states_are_the_training_forms(family: str, tree: str) -> None:
    """After any step the adapter's cache holds what one pass over the whole text would give."""
    target_model = settled(family)
    draft = recorder(target_model, threshold=0.3)

    def expected(text: list[int]) -> Tensor:
        tokens = torch.tensor([text])
        with torch.no_grad():
            return target_model.logits(
                draft.states(
                    target_model.run(tokens, aux_layers=draft.aux_layers), Rows.from_tokens(tokens)
                )[0]
            )

    for prompt in PROMPTS:
        draft.log.clear()
        out = Decoder(target_model, draft, TREES[tree]).generate(prompt, 30, ())
        every = expected(prompt + out.tokens)
        assert len(draft.log) == out.steps
        for (length,), logits in draft.log:
            assert torch.allclose(logits[0], every[length], atol=1e-9)
    draft.log.clear()
    together = BatchDecoder(target_model, draft, TREES[tree]).generate_batch(PROMPTS, 30, ())
    texts = [expected(prompt + out.tokens) for prompt, out in zip(PROMPTS, together, strict=True)]
    for lengths, logits in draft.log:
        if len(lengths) == len(PROMPTS):  # before the first row is done, so that rows are in order
            for row, length in enumerate(lengths):
                assert torch.allclose(logits[row], texts[row][length], atol=1e-9)


class _Reads:
    """Counts the positions that pass through a module."""

    def __init__(self, module: nn.Module) -> None:
        self.positions = 0
        self.passes = 0
        module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = args[0] if args else named["hidden_states"]
        self.positions += states.shape[0] * states.shape[1]
        self.passes += 1


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("tree", TREES)
def test_the_first_layers_run_once_for_every_token(tree: str, threshold: float) -> None:
    """For committed and drafted tokens, in one row or four; other layers run once per step, over
    the same tokens.
    """
    target_model = settled("llama", first=2)
    draft = recorder(target_model, exit_layer=2, threshold=threshold)
    layers = [_Reads(layer) for layer in target_model.body.layers]
    reads = _Reads(draft.adapter.body.layers[0])
    prompt = PROMPTS[0]
    out = Decoder(target_model, draft, TREES[tree]).generate(prompt, 30, ())
    nodes = sum(proposal.tokens.shape[1] for proposal in draft.proposals)
    assert [layer.positions for layer in layers] == [len(prompt) + nodes] * 3
    assert layers[2].passes == 1 + out.steps
    assert layers[0].passes == 1 + sum(proposal.tree.max_depth + 1 for proposal in draft.proposals)
    # the adapter reads what has children, and before a root the position before it
    inner = sum(sum(1 for below in proposal.tree.children if below) for proposal in draft.proposals)
    assert reads.positions == len(prompt) + inner + out.steps
    for layer in layers:
        layer.positions = 0
    draft.proposals.clear()
    BatchDecoder(target_model, draft, TREES[tree]).generate_batch(PROMPTS, 30, ())
    nodes = sum(proposal.tokens.numel() for proposal in draft.proposals)
    assert [layer.positions for layer in layers] == [
        len(PROMPTS) * max(len(prompt) for prompt in PROMPTS) + nodes
    ] * 3


def _chain_by_hand(target_model: TargetModel, draft: KangarooDraft, text: list[int]) -> list[int]:
    """The paper's draft of at most gamma tokens, by whole passes; the token that stops it is kept."""
    guesses: list[int] = []
    while len(guesses) < draft.num_heads:
        tokens = torch.tensor([text + guesses])
        states = draft.states(
            target_model.run(tokens, aux_layers=draft.aux_layers), Rows.from_tokens(tokens)
        )
        p = target_model.logits(states[0, -1]).softmax(-1)
        guesses.append(int(p.argmax()))
        if float(p.max()) <= draft.threshold:
            break
    return guesses


def test_the_chain_is_the_papers() -> None:
    """Kangaroo, Eq. 4: at most gamma tokens, none after one with a confidence of eta or less."""
    target_model = settled("llama", sharpness=3.0)
    draft = recorder(target_model, num_heads=5, threshold=0.6)
    prompt = PROMPTS[0]
    out = Decoder(target_model, draft, Tree.chain(5)).generate(prompt, 40, ())
    position, lengths = 1, set()
    with torch.no_grad():
        for proposal, accepted in zip(draft.proposals, out.accepted, strict=True):
            drafted = proposal.tokens[0].tolist()
            assert drafted[0] == out.tokens[position - 1]
            assert drafted[1:] == _chain_by_hand(
                target_model, draft, prompt + out.tokens[:position]
            )
            assert proposal.tree.size == len(drafted) - 1
            lengths.add(len(drafted) - 1)
            position += accepted + 1
    assert {1, 5} < lengths  # it stopped at once, in between and never


def test_a_trees_level_is_stopped_by_the_share_of_all_its_guesses() -> None:
    draft = KangarooDraft.from_target_model(
        random_target_model("llama"), exit_layer=1, threshold=0.5
    )
    level = Level(1, 3, None, 1, 3, 2, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]))
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]], dtype=torch.float64)
    tokens, below, share = draft._guess(
        p.log() - 3, level, torch.tensor([[0.6, 0.2]], dtype=torch.float64), 0.5
    )
    assert tokens.tolist() == [[0, 1, 1]]
    assert share is not None
    assert torch.allclose(below, torch.tensor([[0.375, 0.225, 0.2]], dtype=torch.float64))
    assert float(share) == pytest.approx(0.8)


def test_rows_of_a_batch_stop_drafting_when_the_last_would() -> None:
    target_model = settled("qwen3", sharpness=3.0)
    draft = recorder(target_model, threshold=0.6)
    for prompt in PROMPTS:
        Decoder(target_model, draft, Tree.chain(5)).generate(prompt, 2, ())
    alone = [proposal.tree.max_depth for proposal in draft.proposals]
    draft.proposals.clear()
    BatchDecoder(target_model, draft, Tree.chain(5)).generate_batch(PROMPTS, 2, ())
    assert len(set(alone)) > 1
    assert draft.proposals[0].tree.max_depth == max(alone)


def test_sampling_with_a_chain_is_lossless() -> None:
    target_model = five_token_target_model()
    decoder = BatchDecoder(
        target_model, early_exit(target_model, num_heads=2, threshold=0.3), Tree.chain(2)
    )
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 1000


def test_latency_is_measured_without_early_exit() -> None:
    target_model = settled("llama")
    draft = recorder(target_model, threshold=1.0)
    time_steps(
        target_model,
        draft,
        [Tree.empty(), Tree.chain(3)],
        PROMPTS[0],
        RunProgress(Console(file=StringIO())),
        QUICK,
    )
    assert {proposal.tree.max_depth for proposal in draft.proposals} == {3}
    draft.proposals.clear()
    Decoder(target_model, draft, Tree.chain(3)).generate(PROMPTS[0], 10, ())
    assert {proposal.tree.max_depth for proposal in draft.proposals} == {1}


def test_steps_without_a_proposal() -> None:
    """As around the switch of a longrope model: the adapter reads positions that no tree was
    proposed at.
    """
    target_model = settled("qwen2")
    draft = recorder(target_model)
    text = PROMPTS[0] + [21, 22, 23, 24]
    steps = begun(target_model, draft, Tree.chain(2), [PROMPTS[0]])
    with torch.inference_mode():
        for root in text[10:13]:
            steps.step([root], skip_draft=True)
        assert not draft.proposals
        steps.step(text[-1:])
        rows = Rows.from_tokens(torch.tensor([text]))
        expected = target_model.logits(
            draft.states(target_model.run(rows.tokens, aux_layers=draft.aux_layers), rows)[0, -1]
        )
    assert torch.allclose(draft.log[0][1][0], expected, atol=1e-9)


def test_an_interrupted_answer_leaves_no_trace() -> None:
    target_model = settled("llama")
    decoder = Decoder(target_model, early_exit(target_model), TREES["wide"])
    expected = decoder.generate(PROMPTS[0], 20, ()).tokens
    calls = count()

    def interrupt(*args: object) -> None:
        if next(calls) == 3:  # a pass over the second level of the first tree
            raise KeyboardInterrupt

    hook = target_model.layer(0).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS[0], 20, ())
    hook.remove()
    assert decoder.generate(PROMPTS[0], 20, ()).tokens == expected

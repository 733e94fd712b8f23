"""Decoding with Amphista heads says what plain decoding says, alone and in batches, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.ranks import trace_answer
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.amphista import AmphistaDraft, AmphistaState
from medusa_train.models.drafts.base import Proposal
from medusa_train.trees.tree import Tree
from tests.families import NoTokenizer, random_backbone
from tests.inference.chi_square import p_value
from tests.models.test_amphista import VARIANTS, trained_like

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


class Whisperer(AmphistaDraft):
    """Heads that are told what comes next at some steps, so that rows accept unlike lengths."""

    truth: dict[int, list[int]]

    def whisper(self, answers: Sequence[list[int]]) -> None:
        """Let them know `answers`: behind each token what followed it last."""
        self.truth = {token: answer[i + 1 : i + 4] for answer in answers for i, token in enumerate(answer)}

    def propose(self, state: AmphistaState, roots: Tensor, tree: Tree) -> Proposal:
        proposal = super().propose(state, roots, tree)
        for row, root in enumerate(roots.tolist()):
            known = self.truth.get(root, [])
            for node, path in enumerate(tree.paths, start=1):
                if path[-1] == len(path) % 2 and len(known) >= len(path) and (root + len(path)) % 3:
                    proposal.tokens[row, node] = known[len(path) - 1]
        return proposal


def _whisperer(backbone: Backbone, answers: Sequence[list[int]], **settings: Any) -> Whisperer:
    draft = Whisperer.from_backbone(backbone, **{"num_heads": 4, **settings})
    assert isinstance(draft, Whisperer)
    draft.load_state_dict(trained_like(backbone, **{"num_heads": 4, **settings}).state_dict())
    draft.whisper(answers)
    return draft


@pytest.mark.parametrize("variant", ["amphista", "alpha", "no-staged-adaptation", "no-sampled-token"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mistral-window", "qwen3"])
def test_rows_say_what_plain_decoding_says(family: str, variant: str) -> None:
    backbone = random_backbone(family)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    draft = _whisperer(backbone, plain, **VARIANTS[variant])
    alone = [Decoder(backbone, draft, TREE).generate(prompt, 24) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == plain
    assert sum(sum(out.accepted) for out in alone) > 10
    together = BatchDecoder(backbone, draft, TREE).generate_batch(PROMPTS, 24)
    assert [out.tokens for out in together] == plain
    assert len({tuple(out.accepted) for out in together}) > 2  # rows fell apart, so that the comparison can fail
    # a row's guesses do not depend on the others either
    assert [out.accepted for out in together] == [out.accepted for out in alone]


@pytest.mark.parametrize("family", ["phi3-longrope", "gemma3", "granite"])
def test_families_whose_layers_or_embeddings_are_of_another_kind(family: str) -> None:
    backbone = random_backbone(family)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    draft = _whisperer(backbone, plain)
    assert [Decoder(backbone, draft, TREE).generate(prompt, 24).tokens for prompt in PROMPTS] == plain
    assert [out.tokens for out in BatchDecoder(backbone, draft, TREE).generate_batch(PROMPTS, 24)] == plain


def test_the_ranks_of_a_trace_are_those_of_decoding() -> None:
    """Calibration looks at whole answers; the loop guesses step by step."""
    backbone = random_backbone("llama")
    draft = trained_like(backbone, num_heads=3)
    answer = Decoder(backbone).generate(PROMPTS[0], 20).tokens
    trace = trace_answer(backbone, draft, PROMPTS[0], answer)
    guesses: list[Tensor] = []

    class Listening(AmphistaDraft):
        def propose(self, state: AmphistaState, roots: Tensor, tree: Tree) -> Proposal:
            guesses.append(self._orders(self._read(state, roots), state.stacked, 3)[:, 0])
            return Proposal(roots[:, None].repeat(1, tree.size + 1), tree)

    listening = Listening.from_backbone(backbone, **draft.settings)
    listening.load_state_dict(draft.state_dict())
    steps = Decoder(backbone, listening, Tree.chain(1)).generate(PROMPTS[0], 20)
    place = 0
    for logits, accepted in zip(guesses, steps.accepted, strict=True):
        for k in range(1, min(3, len(answer) - 1 - place) + 1):
            rank = int((logits[k - 1] > logits[k - 1, answer[place + k]]).sum())
            assert trace.ranks[place][k - 1] == (rank if rank < 10 else -1)
        place += accepted + 1


def test_sampling_through_the_whole_loop_is_lossless() -> None:
    """5,000 rows at a time, a real model over five tokens: three tokens follow its own joint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6)
    backbone = Backbone(model, NoTokenizer(), "five")
    decoder = BatchDecoder(backbone, trained_like(backbone, num_heads=2), Tree.cartesian([2, 2]))
    rule = Sampling(0.8)
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(125, dtype=torch.long)
    accepted = 0
    for _ in range(4):
        out = decoder.generate_batch([[1, 2]] * 5000, 3, (), rule, [generator] * 5000)
        accepted += sum(sum(row.accepted) for row in out)
        words = torch.tensor([a * 25 + b * 5 + c for a, b, c in (row.tokens for row in out)])
        counts += torch.bincount(words, minlength=125)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    texts = torch.cat([torch.tensor([[1, 2]]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        log_p = rule.warp(model(texts).logits.double()).log_softmax(-1)
    joint = log_p[:, 1:4].gather(-1, every[..., None]).sum((1, 2)).exp()
    assert accepted > 2000
    assert p_value(counts, joint) > 1e-4
    assert p_value(counts, rule.warp(joint.log()).softmax(-1)) < 1e-12  # another distribution fails

"""Several rows at once say what each says alone: in float64 exactly, for every family, length and ending."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.batch import BatchDecoder, PendingRequest
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposal
from medusa_train.models.drafts.medusa import MedusaDraft, MedusaState
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, NoTokenizer, random_backbone
from tests.inference.chi_square import p_value

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17], [5, 17, 40, 2]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


class Whisperer(MedusaDraft):
    """Heads that are told what comes next at some steps, so that rows accept unlike lengths."""

    truth: dict[int, list[int]]

    def propose(self, state: MedusaState, roots: Tensor, tree: Tree) -> Proposal:
        proposal = super().propose(state, roots, tree)
        for row, root in enumerate(roots.tolist()):
            known = self.truth.get(root, [])
            for node in range(1, tree.size + 1):
                path = tree.paths[node - 1]
                if path[-1] == len(path) % 2 and len(known) >= len(path) and (root + len(path)) % 3:
                    proposal.tokens[row, node] = known[len(path) - 1]
        return proposal


def _draft(backbone: Backbone, answers: Sequence[list[int]] = ()) -> MedusaDraft:
    draft = Whisperer.from_backbone(backbone, num_heads=4)
    assert isinstance(draft, Whisperer)
    draft.truth = {}
    for answer in answers:
        for i, token in enumerate(answer):
            draft.truth[token] = answer[i + 1 : i + 4]
    torch.manual_seed(1)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["empty", "sparse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_says_what_it_says_alone(family: str, tree: Tree) -> None:
    backbone = random_backbone(family)
    alone = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    draft = _draft(backbone, alone)
    together = BatchDecoder(backbone, draft, tree).generate_batch(PROMPTS, 24)
    assert [out.tokens for out in together] == alone
    assert all(1 + out.steps + sum(out.accepted) >= 24 for out in together)
    if tree.size:
        assert len({tuple(out.accepted) for out in together}) > 2  # rows fell apart, so that the comparison can fail
        assert sum(sum(out.accepted) for out in together) > 10
    else:
        assert [out.steps for out in together] == [23] * 5


@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["empty", "sparse"])
def test_rows_end_at_different_times(tree: Tree) -> None:
    backbone = random_backbone("llama")
    backbone.max_context = 26
    alone = [Decoder(backbone).generate(prompt, 18, ()) for prompt in PROMPTS]
    eos = [alone[1].tokens[0], alone[2].tokens[4], alone[3].tokens[7]]
    expected = [Decoder(backbone).generate(prompt, 18, eos) for prompt in PROMPTS]
    assert len({out.finish for out in expected}) > 1
    draft = _draft(backbone, [out.tokens for out in alone])
    decoder = BatchDecoder(backbone, draft, tree)
    for _ in range(2):
        together = decoder.generate_batch(PROMPTS, 18, eos)
        assert [(out.tokens, out.finish) for out in together] == [(out.tokens, out.finish) for out in expected]
    assert len({len(out.tokens) for out in together}) > 2
    for out in together:
        assert len(out.accepted) == out.steps
        assert len(out.tokens) <= 1 + out.steps + sum(out.accepted)


def test_the_contexts_end_and_mistakes() -> None:
    backbone = random_backbone("qwen3")
    backbone.max_context = 12
    out = BatchDecoder(backbone, _draft(backbone), TREE).generate_batch([PROMPTS[0], [4], list(range(2, 14))], 30)
    assert [(len(row.tokens), row.finish) for row in out] == [(3, "context"), (12, "context"), (1, "context")]
    decoder = BatchDecoder(backbone)
    assert decoder.generate_batch([], 5) == []
    with pytest.raises(MedusaError, match="13 tokens, but the model's context is 12"):
        decoder.generate_batch([[1], list(range(13))], 5)
    with pytest.raises(ValueError, match="1 generators for 2 prompts"):
        decoder.generate_batch([[1], [2]], 5, generators=[torch.Generator()])
    with pytest.raises(ValueError, match="a generator for every row"):
        decoder.generate_batch([[1], [2]], 5, rule=Sampling())


@pytest.mark.parametrize("rule", [Sampling(0.8, top_p=0.9), Sampling(1.2, top_k=20), Typical(0.9)])
@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["empty", "sparse"])
def test_a_rows_draws_do_not_depend_on_the_others(tree: Tree, rule: Rule) -> None:
    backbone = random_backbone("mistral-window")
    draft = _draft(backbone)

    def generators(count: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(count)]

    together = BatchDecoder(backbone, draft, tree).generate_batch(PROMPTS, 15, (), rule, generators(5))
    one = Decoder(backbone, draft, tree)
    for prompt, out, generator in zip(PROMPTS, together, generators(5), strict=True):
        assert one.generate(prompt, 15, (), rule, generator).tokens == out.tokens
    others = generators(5)
    order = [4, 2, 0]
    fewer = BatchDecoder(backbone, draft, tree).generate_batch(
        [PROMPTS[i] for i in order], 15, (), rule, [others[i] for i in order]
    )
    assert [out.tokens for out in fewer] == [together[i].tokens for i in order]


QUEUE = [*PROMPTS, [9] * 12, [33, 2], [8], [41, 40, 39], list(range(1, 20)), [6, 6], [12, 30]]


def _streamed(
    backbone: Backbone,
    max_new_tokens: int,
    eos: Sequence[int] | None = (),
    rule: Rule = None,
    rows: int = 3,
    wanted: int = 1,
) -> tuple[list[Generation], list[int]]:
    """Answers to QUEUE, `rows` at a time, where others join as soon as `wanted` places are free; rows of each pass."""
    batch = BatchDecoder(backbone).begin(max_new_tokens, eos, rule)
    generator = (torch.Generator().manual_seed(seed) for seed in range(len(QUEUE)))
    coming = [PendingRequest(n, prompt, next(generator) if rule else None) for n, prompt in enumerate(QUEUE)]
    answers: dict[int, Generation] = {}
    sizes = []
    while coming or batch.active:
        if coming and rows - len(batch.active) >= wanted:
            free = rows - len(batch.active)
            joining, coming = coming[:free], coming[free:]
            batch.add_requests(joining)
        sizes.append(len(batch.active))
        done = batch.step()
        assert not {ticket for ticket, _ in done} & set(answers)
        answers.update(done)
    assert batch.step() == []
    return [answers[n] for n in range(len(QUEUE))], sizes


@pytest.mark.parametrize("wanted", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3-longrope"])
def test_rows_that_join_late_say_what_they_say_alone(family: str, wanted: int) -> None:
    backbone = random_backbone(family)
    free = [Decoder(backbone).generate(prompt, 14, ()).tokens for prompt in QUEUE]
    eos = [free[0][2], free[3][5], free[5][9]]
    alone = [Decoder(backbone).generate(prompt, 14, eos) for prompt in QUEUE]
    assert len({len(out.tokens) for out in alone}) > 3  # so that rows join beside others of unlike length
    made, sizes = _streamed(backbone, 14, eos, wanted=wanted)
    assert [(out.tokens, out.finish, out.steps) for out in made] == [(o.tokens, o.finish, o.steps) for o in alone]
    assert all(0 < out.prefill_seconds <= out.seconds for out in made)
    assert max(sizes) == 3
    assert sum(sizes) == sum(out.steps for out in alone)


def test_rows_join_up_to_the_contexts_end_and_in_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.trees.kv_cache._BLOCK", 4)
    backbone = random_backbone("llama")
    backbone.max_context = 24
    alone = [Decoder(backbone).generate(prompt, 17, ()) for prompt in QUEUE]
    assert {out.finish for out in alone} == {"length", "context"}
    for rows in (1, 2, 5):
        made, sizes = _streamed(backbone, 17, rows=rows)
        assert [(out.tokens, out.finish) for out in made] == [(out.tokens, out.finish) for out in alone]
        assert max(sizes) == rows


@pytest.mark.parametrize("rule", [Sampling(0.8, top_p=0.9), Sampling(1.2, top_k=20)])
def test_what_a_row_draws_does_not_depend_on_when_it_joined(rule: Rule) -> None:
    backbone = random_backbone("mistral-window")
    one = Decoder(backbone)
    alone = [
        one.generate(prompt, 12, (7, 9), rule, torch.Generator().manual_seed(seed)).tokens
        for seed, prompt in enumerate(QUEUE)
    ]
    for rows, wanted in ((3, 1), (4, 2)):
        made, _ = _streamed(backbone, 12, (7, 9), rule, rows, wanted)
        assert [out.tokens for out in made] == alone


def test_who_may_not_join() -> None:
    backbone = random_backbone("qwen3")
    backbone.max_context = 12
    batch = BatchDecoder(backbone).begin(4, ())
    batch.add_requests([PendingRequest(0, [1, 2])])
    with pytest.raises(MedusaError, match="13 tokens, but the model's context is 12"):
        batch.add_requests([PendingRequest(1, [3]), PendingRequest(2, list(range(13)))])
    assert len(batch.active) == 1
    batch.add_requests([PendingRequest(3, [3])])
    done = [step for _ in range(3) for step in batch.step()]
    assert [(ticket, out.tokens) for ticket, out in done] == [
        (ticket, Decoder(backbone).generate(prompt, 4, ()).tokens) for ticket, prompt in ((0, [1, 2]), (3, [3]))
    ]
    speculating = BatchDecoder(backbone, _draft(backbone), TREE).begin(4, ())
    speculating.add_requests([PendingRequest(0, [1, 2])])
    with pytest.raises(ValueError, match="rows with a draft are active"):
        speculating.add_requests([PendingRequest(1, [3])])
    with pytest.raises(ValueError, match="can't decode in batches"):
        BatchDecoder(random_backbone("phi3-longrope")).begin(4)


def test_sampling_through_the_whole_loop_is_lossless() -> None:
    """5,000 rows at a time, a real model over five tokens, its heads untrained: three tokens follow its own joint."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=5,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=16,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6)
    backbone = Backbone(model, NoTokenizer(), "five")
    draft = MedusaDraft.from_backbone(backbone, num_heads=2)
    decoder = BatchDecoder(backbone, draft, Tree.cartesian([2, 2]))
    rule = Sampling(0.8)
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(125, dtype=torch.long)
    accepted = 0
    for _ in range(4):
        out = decoder.generate_batch([[1, 2]] * 5000, 3, (), rule, [generator] * 5000)
        accepted += sum(sum(row.accepted) for row in out)
        counts += torch.bincount(
            torch.tensor([a * 25 + b * 5 + c for a, b, c in (r.tokens for r in out)]), minlength=125
        )
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    texts = torch.cat([torch.tensor([[1, 2]]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        log_p = rule.warp(model(texts).logits.double()).log_softmax(-1)
    joint = log_p[:, 1:4].gather(-1, every[..., None]).sum((1, 2)).exp()
    assert accepted > 2000
    assert torch.allclose(joint.sum(), torch.ones((), dtype=torch.float64))
    assert p_value(counts, joint) > 1e-4
    assert p_value(counts, rule.warp(joint.log()).softmax(-1)) < 1e-12  # another distribution fails

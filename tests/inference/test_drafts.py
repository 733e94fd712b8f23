"""What holds for every kind of draft: the backbone's own text, greedy and sampled, alone and in batches; files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.checkpoint.heads import load_draft, save_draft
from medusa_train.errors import CheckpointError
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.inference.traces import trace_answer
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import Rows
from medusa_train.trees.tree import Tree
from tests.families import NoTokenizer, random_backbone
from tests.inference.chi_square import p_value

#: Each kind, small and in its variants.
SETTINGS: dict[str, dict[str, object]] = {
    "medusa": {"num_heads": 3, "num_layers": 1, "share_lm_head": False},
    "hydra": {"num_heads": 3, "num_layers": 2, "prefix_layer": False, "dropout": 0.1},
    "hydra++": {"num_heads": 3, "num_layers": 1, "prefix_layer": True, "dropout": 0.0},
    "amphista": {"num_heads": 4, "auto_blocks": 1, "adaptation_layers": 2, "sampled_token": True},
    "kangaroo": {"num_heads": 3, "exit_layer": 1, "threshold": 0.3},
}
KINDS = [name for name in SETTINGS if name.strip("+") in DRAFTS]
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


def random_draft(kind: str, backbone: Backbone, spread: float = 0.03) -> Draft:
    """A draft that guesses right now and then: as untrained, with some noise in every weight."""
    draft = DRAFTS[kind.strip("+")].from_backbone(backbone, **SETTINGS[kind])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return draft.eval()


@pytest.mark.parametrize("tree", [Tree.chain(3), TREE], ids=["chain", "sparse"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mistral-window", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_backbones_own_alone_and_in_a_batch(kind: str, family: str, tree: Tree) -> None:
    backbone = random_backbone(family)
    draft = random_draft(kind, backbone)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    decoder = Decoder(backbone, draft, tree)
    assert [decoder.generate(prompt, 24).tokens for prompt in PROMPTS] == plain
    together = BatchDecoder(backbone, draft, tree).generate_batch(PROMPTS, 24)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]  # rows end at different times
    short = [Decoder(backbone).generate(prompt, 24, eos).tokens for prompt in PROMPTS]
    assert [out.tokens for out in BatchDecoder(backbone, draft, tree).generate_batch(PROMPTS, 24, eos)] == short


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_accepts_does_not_depend_on_the_others(kind: str) -> None:
    """A draft's own caches hold the same in a batch as alone, or its guesses would differ.

    Trees are filled whole: one that stops early goes on in a batch while any row is sure, and then another number is
    drawn for the same token.
    """
    backbone = random_backbone("llama")
    draft = random_draft(kind, backbone)
    rule = Sampling(1.5)
    one = Decoder(backbone, draft, TREE)
    each = [torch.Generator().manual_seed(i) for i in range(len(PROMPTS))]
    with draft.no_early_exit():
        alone = [one.generate(p, 24, (), rule, torch.Generator().manual_seed(i)) for i, p in enumerate(PROMPTS)]
        together = BatchDecoder(backbone, draft, TREE).generate_batch(PROMPTS, 24, (), rule, each)
    assert [out.tokens for out in together] == [out.tokens for out in alone]
    assert [out.accepted for out in together] == [out.accepted for out in alone]
    assert sum(sum(out.accepted) for out in alone) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_follows_the_backbones_distribution(kind: str) -> None:
    """2,500 rows at a time, a real model over five tokens: three tokens follow its own joint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6)
    backbone = Backbone(model, NoTokenizer(), "five")
    decoder = BatchDecoder(backbone, random_draft(kind, backbone), Tree.cartesian([2, 2]))
    rule, generator = Sampling(0.8), torch.Generator().manual_seed(7)
    counts = torch.zeros(125, dtype=torch.long)
    accepted = 0
    for _ in range(4):
        out = decoder.generate_batch([[1, 2]] * 2500, 3, (), rule, [generator] * 2500)
        accepted += sum(sum(row.accepted) for row in out)
        texts = [a * 25 + b * 5 + c for a, b, c in (row.tokens for row in out)]
        counts += torch.bincount(torch.tensor(texts), minlength=125)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    whole = torch.cat([torch.tensor([[1, 2]]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        log_p = rule.warp(model(whole).logits.double()).log_softmax(-1)
    joint = log_p[:, 1:4].gather(-1, every[..., None]).sum((1, 2)).exp()
    assert accepted > 500
    assert p_value(counts, joint) > 1e-4
    assert p_value(counts, rule.warp(joint.log()).softmax(-1)) < 1e-8  # another distribution fails


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_paper_are_those_of_decoding(kind: str) -> None:
    """Where a step starts, the ranks of what the backbone says next are the path that a full tree accepts."""
    backbone = random_backbone("llama")
    draft = random_draft(kind, backbone)
    prompt = PROMPTS[0]
    tree = Tree.cartesian([3, 3])
    out = Decoder(backbone, draft, tree).generate(prompt, 30, ())
    trace = trace_answer(backbone, draft, prompt, Decoder(backbone).generate(prompt, 40, ()).tokens)
    place = 0
    for accepted in out.accepted[:-1]:
        reached = next(i for i, rank in enumerate([*trace.path(place)[:2], 3]) if rank >= 3)
        if kind == "kangaroo":  # which may have stopped earlier
            assert accepted <= reached
        else:
            assert accepted == reached
        place += accepted + 1


@pytest.mark.parametrize("kind", KINDS)
def test_training_yields_what_the_losses_ask_for(kind: str) -> None:
    backbone = random_backbone("qwen3", dtype=torch.float32)
    draft = random_draft(kind, backbone).train()
    tokens = torch.arange(2, 14).view(2, 6)
    feats = backbone.run(tokens, need=draft.needs)
    states = list(draft.head_states(feats, Rows.from_tokens(tokens)))
    assert len(states) == draft.trained_heads
    assert len(list(draft.teacher_forced_states(feats, Rows.from_tokens(tokens)))) == draft.num_heads
    assert {tuple(state.shape) for state in states} == {(2, 6, 32)}
    sum(draft.lm_head(k).logits(state).logsumexp(-1).mean() for k, state in enumerate(states, start=1)).backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_files_bring_the_same_draft_back_and_nothing_of_the_backbone(kind: str, tmp_path: Path) -> None:
    backbone = random_backbone("mistral", dtype=torch.float32)
    draft = random_draft(kind, backbone)
    learnt = sum(parameter.numel() for parameter in draft.parameters())
    assert learnt == type(draft).count_parameters(backbone.model, **draft.settings)
    again = load_draft(save_draft(draft, tmp_path / "heads", "somebody/model"), backbone)
    assert (draft_name(again), again.settings) == (kind.strip("+"), draft.settings)
    theirs = draft.state_dict()
    assert set(again.state_dict()) == set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    size = sum(path.stat().st_size for path in (tmp_path / "heads").glob("*.safetensors"))
    assert size < 4 * learnt + 20_000
    with pytest.raises(CheckpointError, match="somebody/model"):
        load_draft(tmp_path / "heads", wider_backbone())


def wider_backbone() -> Backbone:
    """Of another hidden size than the families' models."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        eos_token_id=None,
    )
    return Backbone(LlamaForCausalLM(config), NoTokenizer(), "wider")

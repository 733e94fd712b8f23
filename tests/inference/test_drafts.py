"""Every draft: output equality, greedy and sampled, alone and in batches; simulation; training
states; files.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.checkpoint.heads import load_draft, save_draft
from medusa_train.data.batch import shift_labels
from medusa_train.errors import CheckpointError
from medusa_train.inference.accept import Greedy
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.drafts.eagle3 import CONFIDENCE_AT_START, Eagle3Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.tree_search.fit import AcceptedLength
from medusa_train.tree_search.traces import trace_answer, trace_conversations
from medusa_train.trees.tree import Tree
from tests.families import digest_of, random_target_model, without_weights
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import check_equals_plain

#: Small drafts of each kind; `hydra++` has a prefix layer, `medusa-markov` a bias that depends on
#: the token before, `kangaroo-mlp` an lm_head of its own and no attention.
SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3, "num_layers": 1, "share_lm_head": False},
    "medusa-markov": {"num_heads": 3, "num_layers": 1, "share_lm_head": True, "markov_rank": 4},
    "hydra": {"num_heads": 3, "num_layers": 2, "prefix_layer": False, "dropout": 0.1},
    "hydra++": {"num_heads": 3, "num_layers": 1, "prefix_layer": True, "dropout": 0.0},
    "amphista": {"num_heads": 4, "auto_blocks": 1, "adaptation_layers": 2, "sampled_token": True},
    "kangaroo": {"num_heads": 3, "exit_layer": 1, "threshold": 0.3},
    "kangaroo-mlp": {
        "num_heads": 3,
        "exit_layer": 1,
        "mlp_size": 24,
        "attention": False,
        "share_lm_head": False,
    },
    "eagle3": {"num_heads": 3, "train_steps": 2, "layers": [1, 1, 2]},
    "dflash": {"max_draft_tokens": 3, "num_layers": 2, "layers": [1, 2], "window": 7},
    "dflash-markov": {"max_draft_tokens": 3, "num_layers": 1, "layers": [1, 2], "markov_rank": 4},
    "dflash-bidirectional": {
        "max_draft_tokens": 3,
        "num_layers": 2,
        "layers": [1, 2],
        "window": 0,
    },
}
KINDS = list(SETTINGS)
#: Those whose steps can be replayed as CUDA graphs.
REPLAYED_KINDS = [kind for kind in KINDS if kind != "dflash-bidirectional"]
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


def test_every_draft_is_tested() -> None:
    assert {draft_of(kind) for kind in SETTINGS} == set(DRAFTS)


def draft_of(kind: str) -> str:
    """The value of the key `draft`."""
    return kind.partition("-")[0].strip("+")


def random_draft(kind: str, target_model: TargetModel, spread: float = 0.03) -> Draft:
    """An untrained draft with noise in every weight, so that some of its guesses are right."""
    draft = DRAFTS[draft_of(kind)].from_target_model(target_model, **SETTINGS[kind])
    torch.manual_seed(1)
    with torch.no_grad():
        if isinstance(draft, Eagle3Draft):  # as sure as a trained one
            draft.norm.weight.div_(CONFIDENCE_AT_START)
        # a product of two matrices is smaller than either
        for name, parameter in draft.named_parameters():
            parameter.add_(
                torch.randn_like(parameter) * (0.3 if name.startswith("markov") else spread)
            )
    if isinstance(draft, DFlashDraft):
        trained = (kind, spread, digest_of(target_model))
        if trained not in TRAINED:
            with torch.random.fork_rng(devices=[]):
                train_briefly(draft, target_model)
            TRAINED[trained] = {name: w.detach().cpu() for name, w in draft.state_dict().items()}
        draft.load_state_dict(TRAINED[trained])
    return draft.eval()


#: Weights of drafts that a test of this process has trained, by kind, spread and target model.
TRAINED: dict[tuple[str, float, str], dict[str, torch.Tensor]] = {}


def train_briefly(draft: Draft, target_model: TargetModel) -> None:
    """Train a draft that begins at random on two greedy answers: without that nearly no guess is
    accepted.
    """
    decoder = Decoder(target_model)
    prompts = [[token % target_model.vocab_size for token in prompt] for prompt in PROMPTS[:2]]
    rows = [prompt + decoder.generate(prompt, 24, ()).tokens for prompt in prompts]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(12):
        losses = []
        for row in rows:
            batch = Rows.from_tokens(torch.tensor([row], device=target_model.device))
            with torch.no_grad():
                hidden_states = target_model.run(batch.tokens, aux_layers=draft.aux_layers)
            for k, states in enumerate(draft.head_states(hidden_states, batch), start=1):
                targets = shift_labels(batch.tokens, k, batch.segments).flatten()
                logits = draft.lm_head(k).logits(states).flatten(0, 1)
                losses.append(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("tree", [Tree.chain(3), TREE], ids=["chain", "sparse"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(
    kind: str, family: str, tree: Tree
) -> None:
    target_model = random_target_model(family)
    check_equals_plain(target_model, random_draft(kind, target_model), PROMPTS, tree)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_follows_the_target_models_distribution(kind: str) -> None:
    target_model = five_token_target_model()
    decoder = BatchDecoder(target_model, random_draft(kind, target_model), Tree.cartesian([2, 2]))
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 500


@pytest.mark.parametrize("kind", KINDS)
def test_traced_ranks_are_those_of_decoding(kind: str) -> None:
    """At the start of each step, the ranks of the following tokens are the path that a full tree
    accepts.
    """
    target_model = random_target_model("llama")
    draft = random_draft(kind, target_model)
    prompt = PROMPTS[0]
    out = Decoder(target_model, draft, Tree.cartesian([3, 3])).generate(prompt, 30, ())
    trace = trace_answer(
        target_model, draft, prompt, Decoder(target_model).generate(prompt, 40, ()).tokens
    )
    position = 0
    for accepted in out.accepted[:-1]:
        depth = next(i for i, rank in enumerate([*trace.path(position)[:2], 3]) if rank >= 3)
        if draft_of(kind) == "kangaroo":  # it may have stopped early
            assert accepted <= depth
        else:
            assert accepted == depth
        position += accepted + 1


@pytest.mark.parametrize("rule", [Greedy(), Sampling(0.4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_simulation_along_an_answer_gives_the_steps_that_decoded_it(
    kind: str, rule: Greedy | Sampling
) -> None:
    """Cut last steps, answers that end with an end-of-text token, and sampled answers included."""
    target_model = random_target_model("llama")
    draft = random_draft(kind, target_model)
    stops = Decoder(target_model).generate(PROMPTS[0], 8, ()).tokens[-1:]
    endings, accepted = set(), 0
    for tree in (Tree.chain(3), TREE):
        lengths = AcceptedLength(tree)
        generators = (
            None
            if isinstance(rule, Greedy)
            else [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
        )
        with draft.no_early_exit():
            outs = BatchDecoder(target_model, draft, tree).generate_batch(
                PROMPTS, 30, stops, rule, generators
            )
        for prompt, out in zip(PROMPTS, outs, strict=True):
            trace = trace_answer(target_model, draft, prompt, out.tokens)
            assert [lengths[trace.path(start)] for start in trace.simulate(lengths)] == out.accepted
            endings.add(out.finish)
            accepted += sum(out.accepted)
    assert accepted > 0
    assert "length" in endings
    assert "eos" in endings


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_batch_have_the_traces_of_single_rows(kind: str) -> None:
    target_model = random_target_model("llama")
    draft = random_draft(kind, target_model)
    alone = [Decoder(target_model).generate(prompt, 12).tokens for prompt in PROMPTS]
    expected = [
        trace_answer(target_model, draft, PROMPTS[i], answer) for i, answer in enumerate(alone)
    ]
    traced = trace_conversations(target_model, draft, [PROMPTS[:2], PROMPTS[2:]], max_new_tokens=12)
    assert traced.conversations == [expected[:2], expected[2:]]
    assert traced.prompt in PROMPTS
    assert any(rank > 0 for trace in expected for ranks in trace.ranks for rank in ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_training_states_have_the_shapes_that_losses_read(kind: str) -> None:
    target_model = random_target_model("qwen3", dtype=torch.float32)
    draft = random_draft(kind, target_model).train()
    tokens = torch.arange(2, 14).view(2, 6)
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    states = list(draft.head_states(hidden_states, Rows.from_tokens(tokens)))
    assert len(states) == draft.trained_heads
    assert (
        len(list(draft.teacher_forced_states(hidden_states, Rows.from_tokens(tokens))))
        == draft.max_depth
    )
    width = 32 + (SETTINGS[kind].get("markov_rank") or 0)  # type: ignore[operator]
    assert {tuple(state.shape) for state in states} == {(2, 6, width)}
    sum(
        draft.lm_head(k).logits(state).logsumexp(-1).mean()
        for k, state in enumerate(states, start=1)
    ).backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_packed_row_are_computed_as_alone(kind: str, family: str) -> None:
    """At all positions that have a target."""
    target_model = random_target_model(family)
    draft = random_draft(kind, target_model, spread=0.1)
    documents = [
        torch.arange(first, first + length)[None] for first, length in ((2, 9), (20, 4), (30, 6))
    ]
    lengths = [document.shape[1] for document in documents]
    positions = torch.cat([*map(torch.arange, lengths), torch.arange(2)])[None]
    segments = torch.tensor([[0] * 9 + [1] * 4 + [2] * 6 + [-1] * 2])
    packed = Rows(
        torch.cat([*documents, torch.zeros(1, 2, dtype=torch.long)], dim=1), positions, segments
    )
    hidden_states = target_model.run(
        packed.tokens, positions=positions, segments=segments, aux_layers=draft.aux_layers
    )
    together = [
        states.split([*lengths, 2], dim=1) for states in draft.head_states(hidden_states, packed)
    ]
    for index, tokens in enumerate(documents):
        alone = draft.head_states(
            target_model.run(tokens, aux_layers=draft.aux_layers), Rows.from_tokens(tokens)
        )
        for k, expected in enumerate(alone, start=1):
            torch.testing.assert_close(
                together[k - 1][index][:, : -k - 1], expected[:, : -k - 1], atol=1e-6, rtol=0
            )


@pytest.mark.parametrize("kind", KINDS)
def test_saved_drafts_load_unchanged_and_without_target_model_weights(
    kind: str, tmp_path: Path
) -> None:
    target_model = random_target_model("mistral", dtype=torch.float32)
    draft = random_draft(kind, target_model)
    trainable = sum(parameter.numel() for parameter in draft.parameters())
    assert trainable == type(draft).count_parameters(
        without_weights(target_model), **draft.settings
    )
    loaded = load_draft(save_draft(draft, tmp_path / "heads", "somebody/model"), target_model)
    assert (draft_name(loaded), loaded.settings) == (draft_of(kind), draft.settings)
    expected = draft.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert (
        sum(path.stat().st_size for path in (tmp_path / "heads").glob("*.safetensors"))
        < 4 * trainable + 20_000
    )
    with pytest.raises(CheckpointError, match="somebody/model"):
        load_draft(tmp_path / "heads", random_target_model("llama", hidden_size=48))

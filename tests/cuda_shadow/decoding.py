"""Decoding on the pretend device: what the package's loops move between host and device, and what a
capture allows.

Run by `test_cuda_shadow.py`. Greedy text is compared between the loops; values are those of the
CPU's tests.
"""

import io
from collections.abc import Callable, Hashable
from contextlib import nullcontext

import pytest
import torch
from rich.console import Console

import medusa_train
from medusa_train.inference import cuda_graphs
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.cuda_graphs import FixedShapeRunner, Replayable, Step
from medusa_train.inference.fixed_steps import FixedShapeSteps
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.inference.step import Steps
from medusa_train.models.drafts.base import Draft, Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from medusa_train.tree_search import choose_tree as module
from medusa_train.tree_search import time_steps
from medusa_train.tree_search.traces import trace_conversations
from medusa_train.trees.kv_cache import KVCache
from tests.cuda_shadow.device import (
    CaptureError,
    DeviceError,
    Transfers,
    capturing,
    counted,
    outside,
)
from tests.families import NoTokenizer, random_target_model
from tests.inference.test_drafts import PROMPTS, REPLAYED_KINDS, TREE, random_draft
from tests.inference.test_refill import make_draft

RULES: dict[str, AcceptanceRule] = {
    "greedy": Greedy(),
    "sampling": Sampling(0.9, 20, 0.9),
    "typical": Typical(0.8),
}
TOKENS = 12
#: Waits of a step by rule: uploads and downloads. Sampling draws its numbers on the host and reads
# the nucleus.
WAITS = {"greedy": (1, 1), "sampling": (2, 2), "typical": (1, 1)}


class Captured(Replayable):
    """Repeats the step that it was made from under the rules of a capture, as a graph does."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def replay(self) -> None:
        with capturing():
            self._step()


class CheckedRunner(FixedShapeRunner):
    """Runs every step under the rules of a capture, and later ones with the shapes of the first."""

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        graphs.setdefault(key, Captured(step)).replay()


def on_gpu(family: str) -> TargetModel:
    return TargetModel(random_target_model(family).model.to("cuda"), NoTokenizer(), family)


def draft_on_gpu(kind: str, target_model: TargetModel, family: str) -> Draft:
    """A draft that was trained, where its kind is, on the CPU: a step there takes a tenth as long."""
    with outside():
        random_draft(kind, random_target_model(family))
    return random_draft(kind, target_model)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Transfers]:
    """The transfers of every step but the first two of each memory, which move what later ones
    keep.
    """
    counts: list[Transfers] = []
    sessions: list[Steps] = []  # kept, so that no other one has its place in memory
    original = Steps.step

    def step(self: Steps, *args: object, **options: object) -> object:
        with counted() as transfers:
            result = original(self, *args, **options)
        sessions.append(self)
        if sessions.count(self) > 2:
            counts.append(transfers)
        return result

    monkeypatch.setattr(Steps, "step", step)
    return counts


def alone(
    target_model: TargetModel, draft: Proposer | None, rule: AcceptanceRule
) -> list[Generation]:
    decoder = Decoder(target_model, draft, TREE, KVCache(target_model.num_layers, 120, 16))
    return [
        decoder.generate(prompt, TOKENS, (), rule, torch.Generator().manual_seed(5))
        for prompt in PROMPTS[:2]
    ]


def together(
    target_model: TargetModel, draft: Proposer | None, rule: AcceptanceRule
) -> list[Generation]:
    generators = [torch.Generator().manual_seed(5) for _ in PROMPTS]
    return BatchDecoder(target_model, draft, TREE).generate_batch(
        PROMPTS, TOKENS, (), rule, generators
    )


LOOPS: dict[str, tuple[Callable[..., list[Generation]], bool]] = {
    "loop": (alone, False),
    "batch": (together, False),
    "static": (alone, True),
    "static batch": (together, True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["plain", *REPLAYED_KINDS])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_transfers_of_steps(family: str, kind: str, rule: str, steps: list[Transfers]) -> None:
    if family != "llama" and rule != "greedy":
        pytest.skip("the rules read logits, of which families differ in nothing")
    target_model = on_gpu(family)
    draft = None if kind == "plain" else draft_on_gpu(kind, target_model, family)
    texts = []
    for loop, (answers, static) in LOOPS.items():
        target_model.step_runner = CheckedRunner() if static else None
        steps.clear()
        # of Kangaroo, for which the host waits
        with nullcontext() if draft is None else draft.no_early_exit():
            texts.append([one.tokens for one in answers(target_model, draft, RULES[rule])[:2]])
        assert steps
        uploads, downloads = WAITS[rule]
        for step in steps:
            assert step["upload"] + step["pinned upload"] <= uploads, (loop, dict(step.places))
            assert step["download"] == downloads, (loop, dict(step.places))
            assert step["wait"] == 0, (loop, dict(step.places))
            assert (step["pinned upload"] == 1) is static
    if rule != "sampling":
        assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("rule", RULES)
def test_logits_of_all_nodes_stay_where_a_greedy_rule_reads_none(rule: str) -> None:
    target_model = on_gpu("llama")
    target_model.step_runner = CheckedRunner()
    decoder = BatchDecoder(target_model, random_draft("medusa", target_model), TREE)
    generators = [torch.Generator().manual_seed(5) for _ in PROMPTS]
    decoder.generate_batch(PROMPTS, TOKENS, (), RULES[rule], generators)
    assert isinstance(decoder._idle_steps, FixedShapeSteps)
    kept = decoder._idle_steps._logits
    assert (kept is not None) is (rule != "greedy")
    assert kept is None or kept.device.type == "cuda"


def test_steps_are_captured_again_once_a_weight_has_moved() -> None:
    target_model = on_gpu("llama")
    captured: list[Step] = []

    class Counting(CheckedRunner):
        def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
            if key not in graphs:
                captured.append(step)
            super().run(graphs, key, step)

    target_model.step_runner = Counting()
    decoder = Decoder(target_model, None, None, KVCache(target_model.num_layers, 120, 16))
    counts = []
    for moved in (False, False, True, False):
        if moved:
            head = target_model.model.get_output_embeddings()
            weight = head.weight.cpu().clone()
            head.weight = torch.nn.Parameter(weight.to("cuda"), requires_grad=False)
        decoder.generate(PROMPTS[0], TOKENS, ())
        counts.append(len(captured))
    assert counts[0] == counts[1]
    assert counts[2] == counts[3] == 2 * counts[0]


@pytest.mark.parametrize(
    "name",
    [
        "kangaroo",
        "prompt_lookup",
        "rest",
        "lookahead",
        "medusa+prompt_lookup",
        "amphista+lookahead",
        "dynamic eagle3",
        "dynamic eagle3+prompt_lookup",
    ],
)
def test_trees_that_differ_from_step_to_step(name: str) -> None:
    target_model = on_gpu("llama")
    draft = make_draft(name, target_model)
    plain = [one.tokens for one in together(target_model, None, Greedy())]
    assert [one.tokens for one in together(target_model, draft, Greedy())] == plain
    assert [one.tokens for one in alone(target_model, draft, Greedy())] == plain[:2]


@pytest.mark.parametrize("kind", ["medusa", "kangaroo"])
def test_choosing_a_tree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZES", (0, 1, 4))
    monkeypatch.setattr(time_steps, "TIMED_TOKENS", 6)
    monkeypatch.setattr(module, "THOROUGH", time_steps.Effort(rounds=1, steps=2))
    target_model = on_gpu("llama")
    draft, prompts = random_draft(kind, target_model), [[4 + i, 20, 30 + i] for i in range(4)]
    traces = trace_conversations(
        target_model, draft, [[prompt] for prompt in prompts], max_new_tokens=8, token_budget=32
    )
    assert module.choose_tree(target_model, draft, traces, RunProgress(Console(file=io.StringIO())))


@pytest.mark.parametrize("draft", [None, "prompt_lookup"])
def test_a_loaded_model_answers(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaGraphRunner", lambda device: CheckedRunner())
    model = medusa_train.load(base_model="data/tiny", dtype="float32", draft=draft)
    assert model.target_model.device.type == "cuda"
    assert model.generate("Write the word yes three times.", 12)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda x: x + torch.ones(3), DeviceError),
        (lambda x: int(x.sum()), CaptureError),
        (lambda x: x[torch.tensor([1, 0], device=x.device)], CaptureError),
        (lambda x: x[x > 1], CaptureError),
        (lambda x: x.cpu(), CaptureError),
    ],
    ids=["mixed devices", "number", "upload", "mask", "download"],
)
def test_faults_are_seen(fault: Callable[[torch.Tensor], object], error: type[Exception]) -> None:
    x = torch.arange(3.0, device="cuda")
    with pytest.raises(error), nullcontext() if error is DeviceError else capturing():
        fault(x)

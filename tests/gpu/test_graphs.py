"""Steps captured as CUDA graphs give the tokens of the same steps run as they are; replaying
allocates nothing.
"""

import decode
import pytest
import torch
from decode import Setup, Shape
from shapes import Rates, Sizes, llama_config

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest
from medusa_train.inference.cuda_graphs import CudaGraphRunner, FixedShapeRunner, use_cuda_graphs
from medusa_train.inference.generate import Decoder
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.test_batch_decoder import streamed
from tests.inference.test_drafts import KINDS, TREE, random_draft
from tests.inference.test_static_steps import PROMPTS, answers, paths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def target_model_on_gpu(family: str) -> TargetModel:
    target_model = random_target_model(family, dtype=torch.float64)
    return TargetModel(target_model.model.cuda(), target_model.tokenizer, family)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_graphs_give_the_tokens_of_steps(kind: str, family: str) -> None:
    target_model = target_model_on_gpu(family)
    draft, tree = (None, None) if kind == "plain" else (random_draft(kind, target_model), TREE)
    target_model.step_runner = FixedShapeRunner()
    expected = answers(target_model, draft, tree)
    runner = target_model.step_runner = CudaGraphRunner(target_model.device)
    assert paths(answers(target_model, draft, tree)) == paths(expected)
    assert runner.works


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_graphs_of_batches_give_the_tokens_of_steps(kind: str, family: str) -> None:
    """Rows end and join; with five rows all buffers grow and graphs are captured again."""
    target_model = target_model_on_gpu(family)
    draft, tree = (None, None) if kind == "plain" else (random_draft(kind, target_model), TREE)
    target_model.step_runner = FixedShapeRunner()
    expected, _ = streamed(BatchDecoder(target_model, draft, tree), 24, [7, 9])
    runner = target_model.step_runner = CudaGraphRunner(target_model.device)
    decoder = BatchDecoder(target_model, draft, tree)
    for rows, first in ((3, None), (5, None), (5, 1)):
        replayed, _ = streamed(decoder, 24, [7, 9], rows=rows, first=first)
        assert paths(replayed) == paths(expected)
    assert runner.works


def test_graphs_are_captured_after_all_earlier_ones_are_gone() -> None:
    target_model = target_model_on_gpu("llama")
    runner = target_model.step_runner = CudaGraphRunner(target_model.device)
    first = answers(target_model)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert paths(answers(target_model)) == paths(first)
    assert runner.works


def test_a_model_in_four_bits_is_captured() -> None:
    target_model = load_target_model(
        str(PROJECT_ROOT / "data" / "tiny"), dtype="bfloat16", quantization="nf4"
    )
    target_model.step_runner = FixedShapeRunner()
    expected = answers(target_model)
    target_model.step_runner = None
    use_cuda_graphs(target_model)
    assert isinstance(target_model.step_runner, CudaGraphRunner)
    assert paths(answers(target_model)) == paths(expected)
    assert target_model.step_runner.works


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["plain", "tree"])
def test_compiled_passes_are_captured(tree: Tree, rows: int) -> None:
    target_model = target_model_on_gpu("llama")
    draft = random_draft("medusa", target_model)

    def texts(decoder: Decoder | BatchDecoder) -> list[list[int]]:
        if isinstance(decoder, Decoder):
            return [decoder.generate(PROMPTS[0], 40, ()).tokens]
        return [out.tokens for out in streamed(decoder, 24, [7, 9], rows=rows)[0]]

    decoder_class = Decoder if rows == 1 else BatchDecoder
    expected = texts(decoder_class(target_model, draft, tree))
    use_cuda_graphs(target_model)
    target_model.compile_passes(rows)
    assert isinstance(target_model.step_runner, CudaGraphRunner)
    decoder = decoder_class(target_model, draft, tree)
    assert [texts(decoder) for _ in range(2)] == [expected] * 2
    assert target_model.step_runner.works


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["plain", "tree"])
def test_replays_reserve_no_memory(tree: Tree, rows: int) -> None:
    """Replayed kernels use the memory of the capture; what is left are a few numbers of the
    acceptance rule.
    """
    target_model = target_model_on_gpu("gemma3")
    draft = random_draft("medusa", target_model)
    target_model.step_runner = CudaGraphRunner(target_model.device)
    if rows == 1:
        decoder = Decoder(target_model, draft, tree)
        decoder.generate(PROMPTS[0], 40, ())
        step = decoder.stream(PROMPTS[0], 40, ()).__next__
    else:
        batch = BatchDecoder(target_model, draft, tree).begin(40, ())
        batch.add_requests([PendingRequest(n, prompt) for n, prompt in enumerate(PROMPTS)])
        step = batch.step  # type: ignore[assignment]
    for _ in range(3):
        step()
    before = torch.cuda.memory_stats()
    for _ in range(4):
        step()
    after = torch.cuda.memory_stats()
    for name in ("reserved_bytes.all.allocated", "allocation.all.allocated"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("setting", ["static", "compiled"])
def test_the_benchmark_replays_steps_heads_and_loops(setting: str) -> None:
    config = llama_config(256, 512, 2, 4, 2, 1000)
    shape, device = Shape("small", None, config, Sizes.of(config)), torch.device("cuda")
    model = shape.load("bfloat16", setting, device)
    setup, rates = Setup("small", 300, "bfloat16", setting), Rates(1e12, {"bfloat16": 1e14})
    cases = list(decode.timed_calls(model, shape, setup, [16, 63], rates))
    decode.time_in_turns(cases, device, 0.1)
    assert {case.name for case in cases} >= {
        "plain",
        "tree 63",
        "heads",
        "loop, plain",
        "loop, tree 63",
    }
    assert all(case.seconds and case.how() == "CUDA graphs" for case in cases)

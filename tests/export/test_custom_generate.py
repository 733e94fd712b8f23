"""`generate(custom_generate=DIRECTORY)` of transformers: the same tokens as plain `generate` and as
our own loop.
"""

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.errors import CheckpointError
from medusa_train.export import custom_generate
from medusa_train.export.medusa_heads import CUSTOM_GENERATE_REQUIREMENTS
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests import chatml
from tests.families import FAMILIES, random_target_model
from tests.inference.chi_square import five_token_target_model, p_value

BUSHY = Tree.cartesian([12, 4])
TREES = {
    "chain": Tree.chain(3),
    "bushy": BUSHY,
    "sparse": Tree.from_paths([(0,), (1,), (7,), (0, 0), (0, 3), (7, 1), (0, 3, 2)]),
}
PROMPT = [1, 40, 50, 13, 7]
LENGTH = 24


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where transformers copies the code of `custom_generate` directories to."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE",
        str(tmp_path_factory.mktemp("modules")),
    )
    yield
    patch.undo()


def model_of(target_model: TargetModel, attention: str = "sdpa") -> Any:
    """The transformers model, with the attention that it has outside this project."""
    target_model.model.set_attn_implementation(attention)
    return target_model.model


def trained_like(target_model: TargetModel, **settings: Any) -> MedusaDraft:
    """Heads whose guesses are sometimes right."""
    draft = MedusaDraft.from_target_model(target_model, num_heads=3, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


def write(directory: Path, draft: MedusaDraft, tree: Tree) -> str:
    save_draft(draft, directory / "heads", str(directory))
    tree.save(directory / "heads" / "tree.json")
    paths = resolve_model(str(directory / "heads"), None, None, needs_target_model=False)
    return str(export_run(paths, "transformers", directory / "export").target)


@pytest.fixture(scope="module")
def llama() -> TargetModel:
    return random_target_model("llama")


@pytest.fixture(scope="module")
def model(llama: TargetModel) -> Any:
    return model_of(llama)


@pytest.fixture(scope="module")
def directory(llama: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("llama"), trained_like(llama), BUSHY)


def plain(model: Any, prompt: list[int] = PROMPT, **arguments: Any) -> Any:
    return model.generate(
        torch.tensor([prompt]), **{"max_new_tokens": LENGTH, "do_sample": False, **arguments}
    )


def with_heads(model: Any, directory: str, prompt: list[int] = PROMPT, **arguments: Any) -> Any:
    return plain(model, prompt, custom_generate=directory, trust_remote_code=True, **arguments)


def direct(model: Any, directory: str, **arguments: Any) -> list[int]:
    """The same without the copy of the code that transformers makes, whose checks take most of a
    short call.
    """
    options = {"max_new_tokens": LENGTH, "do_sample": False, **arguments}
    prompt = torch.tensor([PROMPT])
    return list(
        custom_generate.generate(prompt, model=model, medusa_heads=directory, **options)[0].tolist()
    )


def passes(model: Any, call: Callable[[], Any]) -> int:
    """The number of forward passes of a call."""
    count = [0]
    hook = model.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    call()
    hook.remove()
    return count[0]


@pytest.mark.parametrize("tree", TREES)
def test_tokens_equal_plain_generate_and_our_loop(
    llama: TargetModel, model: Any, tmp_path: Path, tree: str
) -> None:
    draft = trained_like(llama)
    directory = write(tmp_path, draft, TREES[tree])
    expected = plain(model)
    assert torch.equal(with_heads(model, directory), expected)
    ours = Decoder(llama, draft, TREES[tree]).generate(PROMPT, LENGTH, ())
    assert PROMPT + ours.tokens == expected[0].tolist()
    # the same guesses are accepted: one pass for the prompt, and one for each of our steps
    assert passes(model, lambda: with_heads(model, directory)) == 1 + ours.steps


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", sorted({*FAMILIES} - {"llama", "llama3", "mistral", "qwen2-window"})
)
def test_every_family(tmp_path: Path, family: str, attention: str) -> None:
    """Sliding windows and longrope's original length are those of short answers."""
    changes: dict[str, Any] = (
        {"sliding_window": 40}
        if family in ("mistral-window", "gemma2", "gemma3", "mimo-v2")
        else {}
    )
    target_model = random_target_model(family, **changes)
    model = model_of(target_model, "eager" if target_model.attention == "eager" else attention)
    count = 20 - len(PROMPT) if family == "phi3-longrope" else LENGTH
    directory = write(tmp_path, trained_like(target_model), BUSHY)
    assert torch.equal(
        with_heads(model, directory, max_new_tokens=count), plain(model, max_new_tokens=count)
    )
    assert passes(model, lambda: with_heads(model, directory, max_new_tokens=count)) < count


@pytest.mark.parametrize(("shared", "layers"), [(False, 2), (False, 0), (True, 2)])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_forms_of_heads(
    tmp_path: Path, shared: bool, layers: int, reduced: bool, bias: bool
) -> None:
    """Matrices of their own or the shared lm_head, with the whole or a reduced vocabulary, two
    blocks or none.
    """
    target_model = random_target_model("llama")
    if bias:
        target_model.output_embeddings.bias = torch.nn.Parameter(
            torch.randn(61, dtype=torch.float64)
        )
    tokens = {"vocab_size": 40, "token_map": torch.randperm(61)[:40]} if reduced else {}
    draft = trained_like(target_model, num_layers=layers, share_lm_head=shared, **tokens)
    model, directory = model_of(target_model), write(tmp_path, draft, BUSHY)
    assert torch.equal(with_heads(model, directory), plain(model))
    steps = Decoder(target_model, draft, BUSHY).generate(PROMPT, LENGTH, ()).steps
    assert passes(model, lambda: with_heads(model, directory)) == 1 + steps < LENGTH


# How an answer ends, and what goes in and out


def test_answers_end_at_any_length_inside_a_path(model: Any, directory: str) -> None:
    whole = plain(model)[0].tolist()
    assert passes(model, lambda: with_heads(model, directory)) < 0.8 * LENGTH
    for count in range(1, LENGTH):
        assert direct(model, directory, max_new_tokens=count) == whole[: len(PROMPT) + count]
    assert direct(model, directory, max_new_tokens=None, max_length=14) == whole[:14]


def test_answers_end_at_any_end_token_inside_a_path(model: Any, directory: str) -> None:
    for eos in dict.fromkeys(plain(model)[0].tolist()[len(PROMPT) :]):
        options: dict[str, Any] = {"eos_token_id": [eos, 60], "pad_token_id": 0}
        assert direct(model, directory, **options) == plain(model, **options)[0].tolist()


def test_stop_strings(make_run: Callable[..., Path], target_model_dir: Path) -> None:
    directory = str(export_run(resolve_model(str(make_run()), None, None), "transformers").target)
    model = AutoModelForCausalLM.from_pretrained(target_model_dir, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(target_model_dir)
    free = {"repetition_penalty": 1.0, "eos_token_id": None, "tokenizer": tokenizer}
    answer = plain(model, repetition_penalty=1.0, eos_token_id=None)[0, len(PROMPT) + 5 :].tolist()
    stop = next(
        text
        for token in answer
        if (text := tokenizer.decode([token])).isascii() and text.isprintable()
    )
    expected = plain(model, stop_strings=[stop], **free)
    assert expected.shape[1] < len(PROMPT) + LENGTH
    assert torch.equal(with_heads(model, directory, stop_strings=[stop], **free), expected)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.received.append(value.tolist())

    def end(self) -> None:
        self.received.append("end")


def test_a_streamer_gets_what_plain_generate_gives_it(model: Any, directory: str) -> None:
    ours, theirs = Recorder(), Recorder()
    with_heads(model, directory, streamer=ours)
    plain(model, streamer=theirs)
    assert ours.received == theirs.received


def test_padding_on_the_left_is_no_part_of_the_text(model: Any, directory: str) -> None:
    padded, mask = [0, 0, 0, *PROMPT], torch.tensor([[0] * 3 + [1] * len(PROMPT)])
    out = with_heads(model, directory, padded, attention_mask=mask)
    assert out[0].tolist() == [0, 0, 0, *plain(model)[0].tolist()]
    assert torch.equal(out, plain(model, padded, attention_mask=mask))


def test_a_dictionary_is_returned_on_request(model: Any, directory: str) -> None:
    out = with_heads(model, directory, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(model))
    out = model.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=4,
        custom_generate=directory,
        trust_remote_code=True,
    )
    assert torch.equal(out, plain(model, max_new_tokens=4))


# Sampling


def test_samples_follow_the_model_s_distribution(tmp_path: Path) -> None:
    target_model = five_token_target_model()
    model, directory = (
        model_of(target_model),
        write(tmp_path, trained_like(target_model), Tree.cartesian([2, 2])),
    )
    heads = custom_generate.load_heads(model, directory, {})
    tree = custom_generate.Tree([[0], [1], [0, 0], [0, 1], [1, 0]], directory, model.device)
    config = GenerationConfig(do_sample=True, max_length=5)
    stop = StoppingCriteriaList([MaxLengthCriteria(5)])
    counts = torch.zeros(5, 5, 5)

    @torch.no_grad()
    def sample() -> None:
        for _ in range(400):
            cache = DynamicCache(config=model.config)
            prompt = torch.tensor([[1, 2]])
            text = custom_generate.decode(
                model,
                prompt,
                warpers(0.7),
                stop,
                config,
                heads=heads,
                tree=tree,
                past_key_values=cache,
            )
            counts[tuple(text[0, 2:].tolist())] += 1

    torch.manual_seed(0)
    assert passes(model, sample) < 400 * 2.8  # guesses are accepted
    assert p_value(counts, joint(model, 0.7)) > 1e-3
    assert p_value(counts, joint(model, 1.0)) < 1e-3  # the test can fail


def warpers(temperature: float) -> LogitsProcessorList:
    return LogitsProcessorList(
        [TemperatureLogitsWarper(temperature), TopKLogitsWarper(4), TopPLogitsWarper(0.9)]
    )


def joint(model: Any, temperature: float) -> Tensor:
    """The probabilities of all texts of three tokens after [1, 2], 125."""
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    text = torch.cat([torch.tensor([[1, 2]]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        logits = model(text).logits[:, 1:4]
    p = torch.stack([warpers(temperature)(text, logits[:, i]).softmax(-1) for i in range(3)], dim=1)
    return p.gather(-1, every[..., None]).double().prod(dim=1)[:, 0]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor is not supported"),
        ({"num_beams": 2}, "beam_search is not supported"),
        ({"num_return_sequences": 2, "do_sample": True}, r"one sequence at a time, got 2"),
        ({"use_cache": False}, "needs an empty DynamicCache"),
        ({"cache_implementation": "static"}, "needs an empty DynamicCache"),
        (
            {"return_dict_in_generate": True, "output_scores": True},
            "output_scores is not supported",
        ),
        ({"assistant_model": "another"}, "assistant_model is not supported"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "may only mask padding on the left"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6, 7]])}, "position_ids other than"),
        (
            {"inputs_embeds": torch.zeros(1, 5, 32, dtype=torch.float64)},
            "inputs_embeds is not supported",
        ),
    ],
)
def test_unsupported_arguments_are_refused(
    model: Any, directory: str, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_heads(model, directory, **arguments)


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma3",
            {},
            "sliding window, so prompt and answer must not exceed 6 tokens, and max_length is 29",
        ),
        ("phi3-longrope", {}, "must not exceed 20 tokens"),
        (
            "llama",
            {"max_position_embeddings": 4, "rope_parameters": DYNAMIC_ROPE},
            "must not exceed 4 tokens",
        ),
    ],
)
def test_texts_that_may_get_too_long_are_refused(
    tmp_path: Path, family: str, changes: Any, message: str
) -> None:
    """Dynamic rotary embeddings change at every position, also of a prompt that is too long
    already.
    """
    target_model = random_target_model(family, **changes)
    with pytest.raises(ValueError, match=message):
        with_heads(model_of(target_model), write(tmp_path, trained_like(target_model), BUSHY))


def test_heads_and_trees_that_do_not_fit_are_refused(
    model: Any, llama: TargetModel, tmp_path: Path
) -> None:
    other = random_target_model("llama", vocab_size=50)
    with pytest.raises(
        ValueError, match=r"not the heads of this model \(hidden size 32, 61 tokens"
    ):
        with_heads(model, write(tmp_path / "other", trained_like(other), BUSHY))
    directory = write(tmp_path, trained_like(llama), BUSHY)
    for choices, message in (
        ([[0], [1, 0]], "each path its parent"),
        ([[0] * i for i in range(1, 5)], "is 4 deep"),
    ):
        (Path(directory) / "tree.json").write_text(json.dumps({"medusa_choices": choices}))
        with pytest.raises(ValueError, match=message):
            with_heads(model, directory)
    with pytest.raises(CheckpointError, match=r"the tree is empty"):
        write(tmp_path, trained_like(llama), Tree.empty())


# The file


def test_heads_are_loaded_once_per_model_and_dtype(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    real = custom_generate.load_file

    def load_file(path: str) -> Any:
        loads.append(path)
        return real(path)

    monkeypatch.setattr(custom_generate, "load_file", load_file)
    model = model_of(random_target_model("llama"))
    prompt = torch.tensor([PROMPT])
    for _ in range(2):
        custom_generate.generate(prompt, model=model, medusa_heads=directory, max_new_tokens=2)
    assert len(loads) == 1
    custom_generate.generate(prompt, model=model.float(), medusa_heads=directory, max_new_tokens=2)
    assert len(loads) == 2


def test_heads_of_another_directory_are_loaded_for_the_same_model(
    directory: str, tmp_path: Path
) -> None:
    model = model_of(random_target_model("llama"))
    other = str(shutil.copytree(directory, tmp_path / "other"))
    first, second, again = (
        custom_generate.load_heads(model, source, {}) for source in (directory, other, other)
    )
    assert first is not second
    assert second is again


def test_the_exported_file_is_this_source_and_needs_only_what_it_requires(directory: str) -> None:
    written = (Path(directory) / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert written == Path(custom_generate.__file__).read_text(encoding="utf-8")
    assert 'custom_generate="THIS_DIRECTORY"' in (Path(directory) / "README.md").read_text(
        encoding="utf-8"
    )
    nodes = list(ast.walk(ast.parse(written)))
    imported = {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    standard = {"__future__", "contextlib", "functools", "json", "sys", "typing", "weakref"}
    assert {name.split(".")[0] for name in imported} - standard == {
        "torch",
        "transformers",
        "safetensors",
    }
    pyproject = (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{line}' in pyproject for line in CUSTOM_GENERATE_REQUIREMENTS.splitlines())


def test_heads_that_no_argument_names_are_asked_for() -> None:
    with pytest.raises(
        ValueError, match="with Medusa heads: pass the directory of the heads as medusa_heads="
    ):
        custom_generate._requested_directory(sys._getframe())


def test_answers_end_at_the_end_token_of_the_chat_template(tmp_path: Path) -> None:
    run = chatml.write_run(tmp_path / "run", chatml.write_target_model(tmp_path / "backbone"))
    exported = str(export_run(resolve_model(str(run), None, None), "transformers").target)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "backbone")
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text)["input_ids"]
    answer = with_heads(model, exported, prompt)[0, len(prompt) :]
    assert answer.tolist() == [*tokenizer(chatml.ANSWER)["input_ids"], chatml.IM_END]
    chosen = tokenizer.convert_tokens_to_ids("c")
    shorter = with_heads(model, exported, prompt, eos_token_id=chosen)[0, len(prompt) :]
    assert shorter.tolist() == answer[:3].tolist()
    beyond = tokenizer.convert_tokens_to_ids(chatml.REST[0])
    longer = with_heads(model, exported, prompt, eos_token_id=beyond)[0, len(prompt) :]
    assert longer.tolist() == [*answer.tolist(), beyond]

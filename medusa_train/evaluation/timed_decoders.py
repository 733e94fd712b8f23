"""Decoders that an evaluation times: this project's loop, plain or with a tree, and `generate` of
transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, __version__
from transformers.generation.streamers import BaseStreamer

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.errors import TargetModelError
from medusa_train.evaluation.turns import GENERATE, Answer
from medusa_train.inference.accept import AcceptanceRule, Greedy
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree

PROMPT_LOOKUP = "prompt_lookup"
ASSISTED = "assisted"
#: Measured in addition to dynamic trees.
FIXED_TREE = "fixed_tree"
#: Measured in addition to a merged draft: each of its parts.
HEADS_ALONE = "heads_alone"
LOOKUP_ALONE = "lookup_alone"

#: Tokens that prompt-lookup decoding copies at most per step, its authors' default.
LOOKUP_TOKENS = 10

GREEDY = DecodingMode()


class TimedDecoder(Protocol):
    """A decoder that answers prompts in the same passes and measures them."""

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included."""


class LoopDecoder:
    """This project's decoding loop, with a tree or, without a draft, with the empty one; greedy by
    default.

    A `Decoder` answers one prompt at a time. In a batch, complete rows leave; none joins before its
    end.
    """

    def __init__(
        self,
        decoder: Decoder | BatchDecoder,
        mode: DecodingMode = GREEDY,
        rule: AcceptanceRule = Greedy(),
    ) -> None:
        self._decoder = decoder
        self._mode = mode
        self._rule = rule

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included."""
        decoder = self._decoder
        generators = self._mode.generators(prompts, self._rule)
        started = time.perf_counter()
        # 1. decode; a batch reports its passes, a single row's are its steps
        passes = None
        if isinstance(decoder, Decoder):
            (prompt,) = prompts
            generator = None if generators is None else generators[0]
            output = decoder.generate(
                list(prompt), max_new_tokens, rule=self._rule, generator=generator
            )
            outputs = [output]
        else:
            rows = [list(prompt) for prompt in prompts]
            passes_before = decoder.passes
            outputs = decoder.generate_batch(
                rows, max_new_tokens, rule=self._rule, generators=generators
            )
            passes = decoder.passes - passes_before

        # 2. divide the time among the rows; decoding begins once all prompts are read
        count = len(outputs)
        seconds = (time.perf_counter() - started) / count
        prefill = max(output.prefill_seconds for output in outputs) / count
        return [
            Answer(
                tokens=tuple(output.tokens),
                seconds=seconds,
                prefill_seconds=prefill,
                steps=output.steps,
                accepted=tuple(output.accepted),
                rows=count,
                batch_passes=passes,
            )
            for output in outputs
        ]

    @property
    def tree_size(self) -> int:
        """Number of draft tokens in a step's tree."""
        return self._decoder.tree.size

    def capture(self, rows: int, positions: int) -> None:
        """Capture the steps of `rows` rows with up to `positions` tokens, see
        `BatchDecoder.capture`.
        """
        if isinstance(self._decoder, Decoder):
            self._decoder.capture(positions, self._rule)
        else:
            self._decoder.capture(rows, positions, self._rule)


class PassLog(BaseStreamer):
    """Logs the number of tokens of each pass (`sizes`) of assisted generation or prompt lookup, the
    prefill first.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Count tokens; the first call brings the prompt."""
        if not self._is_prompt:
            self.sizes.append(value.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: `generate` calls it once at the end."""


class GenerateDecoder:
    """`generate` of transformers, with its own cache; greedy by default.

    The target model's generation config is replaced by a bare one for good: a checkpoint may bring a
    repetition penalty or a sampling temperature, which `generate` takes from there.

    Args:
        options: further arguments of `generate` that make it verify drafts, such as an assistant
            model; only then does it report its steps.
    """

    def __init__(
        self, target_model: TargetModel, mode: DecodingMode = GREEDY, **options: Any
    ) -> None:
        self._target_model = target_model
        self._mode = mode
        self._options = options
        target_model.model.generation_config = _bare_config(target_model, mode)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included; prompts
        are padded before.
        """
        if self._mode.acceptance != "greedy":
            torch.manual_seed(self._mode.seed_of(prompts[0]))
        passes = PassLog() if self._options else None
        started = time.perf_counter()
        # 1. pad the prompts on the left
        pad = self._target_model.model.generation_config.pad_token_id
        longest = max(map(len, prompts))
        padded = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._target_model.device
        # 2. generate
        with torch.inference_mode():
            output = self._target_model.model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max_new_tokens,
                streamer=passes,
                **self._options,
            )
        # 3. divide the time among the rows
        answers = [self._until_eos(tokens) for tokens in output[:, longest:].tolist()]
        seconds = (time.perf_counter() - started) / len(answers)
        if passes is None or not passes.sizes:
            return [Answer(tokens, seconds, rows=len(answers)) for tokens in answers]
        (tokens,) = answers  # drafts are verified for a single row only
        return [
            Answer(
                tokens,
                seconds,
                steps=len(passes.sizes) - 1,
                prefill_tokens=min(passes.sizes[0], len(tokens)),
            )
        ]

    def _until_eos(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Cut the padding after a row's end."""
        for index, token in enumerate(tokens):
            if token in self._target_model.eos_ids:
                return tuple(tokens[: index + 1])
        return tuple(tokens)


def _bare_config(target_model: TargetModel, mode: DecodingMode) -> GenerationConfig:
    """Return a generation config with the mode's sampling and nothing of the checkpoint's."""
    eos = list(target_model.eos_ids)
    pad = target_model.tokenizer.pad_token_id
    if pad is None:
        pad = eos[0] if eos else 0
    return GenerationConfig(
        num_beams=1,
        use_cache=True,
        eos_token_id=eos or None,
        pad_token_id=pad,
        **mode.generate_options,
    )


@dataclass(frozen=True)
class Reference:
    """A part of what a model proposes, measured in addition to the whole; with a phrase for the report."""

    proposer: Proposer
    tree: Tree | None
    description: str


def reference_decoders(model: LoadedModel) -> dict[str, Reference]:
    """Return what to measure in addition to a model's proposals: the fixed tree, and the parts of a merged
    draft.
    """
    references: dict[str, Reference] = {}
    if model.tree is None or model.fixed_proposer is None:
        return references
    loop = "the same decoding loop with"
    size = model.tree.size
    if model.dynamic is not None:
        description = f"{loop} the same tree of {size} nodes in every step"
        references[FIXED_TREE] = Reference(model.fixed_proposer, model.tree, description)
    if model.heads is not None and model.lookup is not None:
        trees = f"a tree of {size} nodes" if model.dynamic is None else "dynamic trees"
        description = f"{loop} the heads alone, {trees}"
        references[HEADS_ALONE] = Reference(model.heads, model.tree, description)
        description = f"{loop} the draft without training alone"
        references[LOOKUP_ALONE] = Reference(model.lookup, None, description)
    return references


def extra_baselines(
    target_model: TargetModel,
    assistant_model: str | None,
    *,
    prompt_lookup: bool,
    note: Callable[[str], None],
    mode: DecodingMode = GREEDY,
) -> dict[str, GenerateDecoder]:
    """Return the baselines for single rows: prompt-lookup decoding, and assisted generation if a
    draft model is named.

    Each generates a few tokens first: some architectures' caches cannot be cropped, and a baseline
    that does not run is left out, with a line to `note`.
    """
    baselines: dict[str, GenerateDecoder] = {}
    if mode.batch_size > 1:
        return baselines
    if prompt_lookup:
        baselines[PROMPT_LOOKUP] = GenerateDecoder(
            target_model, mode, prompt_lookup_num_tokens=LOOKUP_TOKENS
        )
    if assistant_model is not None:
        assistant = _load_assistant(assistant_model, target_model, mode)
        baselines[ASSISTED] = GenerateDecoder(target_model, mode, assistant_model=assistant)
    prompt = list(range(min(4, target_model.vocab_size)))
    for name, decoder in list(baselines.items()):
        try:
            decoder.answer([prompt], 3)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            note(
                f"baseline {name}: not supported by transformers for this target model, left out"
                f" ({error})"
            )
            del baselines[name]
    return baselines


def _load_assistant(name: str, target_model: TargetModel, mode: DecodingMode) -> torch.nn.Module:
    assistant = load_target_model(name, dtype=target_model.dtype, device=target_model.device)
    if assistant.tokenizer.get_vocab() != target_model.tokenizer.get_vocab():
        raise TargetModelError(
            f"assistant_model {name}: its tokenizer differs from the target model's; use a smaller"
            " model of the same family"
        )
    assistant.eos_ids = target_model.eos_ids  # of the same vocabulary
    assistant.model.generation_config = _bare_config(assistant, mode)
    return assistant.model


def describe_baseline(name: str, assistant_model: str | None, mode: DecodingMode = GREEDY) -> str:
    """Describe a baseline of transformers for the report."""
    how = "greedy"
    if mode.acceptance != "greedy":
        how = f"sampling at temperature {mode.temperature:g}"
    descriptions = {
        GENERATE: f"generate, {how}, with its own cache",
        PROMPT_LOOKUP: (
            f"prompt-lookup decoding, {how}, up to {LOOKUP_TOKENS} tokens copied per step"
        ),
        ASSISTED: f"assisted generation, {how}, with {assistant_model}",
    }
    return f"transformers {__version__} {descriptions[name]}"

"""Decoders that an evaluation times: this project's decoding loop with or without a tree, and
`generate` of transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, __version__
from transformers.generation.streamers import BaseStreamer

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import TargetModelError
from medusa_train.evaluation.turns import GENERATE, PLAIN, TREE, TimedAnswer
from medusa_train.inference.accept import AcceptanceRule, Greedy
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.generate import Decoder, truncate_at_stop
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree

PROMPT_LOOKUP = "prompt_lookup"
ASSISTED = "assisted"
#: Baseline for dynamic trees: the same tree in every step.
FIXED_TREE = "fixed_tree"
#: Baselines for a merged draft: each of its two parts alone.
HEADS_ALONE = "heads_alone"
LOOKUP_ALONE = "lookup_alone"

#: Prompt-lookup decoding copies at most this many tokens per step; its authors' default.
LOOKUP_TOKENS = 10

GREEDY = DecodingMode()


class TimedDecoder(Protocol):
    """A decoder that answers several prompts in the same passes, and measures the time.

    Attributes:
        description: a phrase for the report.
    """

    description: str

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[TimedAnswer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included."""


class LoopDecoder:
    """This project's decoding loop, with a draft's tree, or without a draft with the empty tree;
    greedy by default.

    A `Decoder` answers one prompt at a time. In a batch, a complete row leaves, but no new row
    joins until the batch ends.
    """

    def __init__(
        self,
        decoder: Decoder | BatchDecoder,
        mode: DecodingMode = GREEDY,
        rule: AcceptanceRule = Greedy(),
        description: str = "",
    ) -> None:
        self._decoder = decoder
        self._mode = mode
        self._rule = rule
        self.description = description

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[TimedAnswer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included."""
        decoder = self._decoder
        rows = [list(prompt) for prompt in prompts]
        generators = self._mode.generators(prompts, self._rule)
        started = time.perf_counter()
        # 1. decode; a batch reports its passes, while the passes of a single row are its steps
        passes = None
        if isinstance(decoder, Decoder):
            (row,) = rows
            generator = None if generators is None else generators[0]
            outputs = [decoder.generate(row, max_new_tokens, None, self._rule, generator)]
        else:
            passes_before = decoder.passes
            outputs = decoder.generate_batch(rows, max_new_tokens, None, self._rule, generators)
            passes = decoder.passes - passes_before

        # 2. divide the time among the rows; decoding begins after the prefill of all prompts
        count = len(outputs)
        seconds = (time.perf_counter() - started) / count
        prefill = max(output.prefill_seconds for output in outputs) / count
        return [
            TimedAnswer(
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
        """Capture the CUDA graphs of steps with `rows` rows of up to `positions` tokens; see
        `BatchDecoder.capture`.
        """
        if isinstance(self._decoder, Decoder):
            self._decoder.capture(positions, self._rule)
        else:
            self._decoder.capture(rows, positions, self._rule)


class PassLog(BaseStreamer):
    """Logs how many tokens each pass of assisted generation or prompt lookup adds (`sizes`). The
    first entry is the prefill.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Log the number of new tokens; the first call passes the prompt, which is not logged."""
        if not self._is_prompt:
            self.sizes.append(value.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: `generate` calls it once at the end."""


class GenerateDecoder:
    """`generate` of transformers, with its own cache; greedy by default.

    The target model's generation config is permanently replaced by a bare one. Otherwise `generate`
    would apply a repetition penalty or a sampling temperature of the checkpoint.

    Args:
        options: further arguments of `generate` that make it verify drafts, such as an assistant
            model; only then does it report its steps.
    """

    def __init__(
        self,
        target_model: TargetModel,
        mode: DecodingMode = GREEDY,
        description: str = "",
        **options: Any,
    ) -> None:
        self._target_model = target_model
        self._mode = mode
        self._options = options
        self.description = f"transformers {__version__} {description}"
        target_model.model.generation_config = _bare_config(target_model, mode)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[TimedAnswer]:
        """Generate up to `max_new_tokens` tokens for each prompt, the first eos included. Prompts
        are left-padded.
        """
        if self._mode.acceptance != "greedy":
            torch.manual_seed(self._mode.seed_of(prompts[0]))
        passes = PassLog()
        started = time.perf_counter()
        # 1. pad the prompts on the left
        model = self._target_model.model
        rows = [torch.tensor(prompt) for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        tokens = pad(rows, padding_value=model.generation_config.pad_token_id)  # [rows, longest]
        mask = pad([torch.ones_like(row) for row in rows])
        # 2. generate
        with torch.inference_mode():
            output = model.generate(
                tokens.to(self._target_model.device),
                attention_mask=mask.to(self._target_model.device),
                max_new_tokens=max_new_tokens,
                streamer=passes if self._options else None,
                **self._options,
            )
        # 3. divide the time among the rows; tokens after the end of a row are padding
        eos_ids = self._target_model.eos_ids
        answers = [
            tuple(truncate_at_stop(row, eos_ids, max_new_tokens))
            for row in output[:, tokens.shape[1] :].tolist()
        ]
        seconds = (time.perf_counter() - started) / len(answers)
        if not passes.sizes:
            return [TimedAnswer(answer, seconds, rows=len(answers)) for answer in answers]
        (answer,) = answers  # drafts are verified for a single row only
        prefill_tokens = min(passes.sizes[0], len(answer))
        return [
            TimedAnswer(answer, seconds, steps=len(passes.sizes) - 1, prefill_tokens=prefill_tokens)
        ]


def _bare_config(target_model: TargetModel, mode: DecodingMode) -> GenerationConfig:
    """Return a generation config with the mode's sampling and no settings of the checkpoint."""
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


def build_decoders(
    model: LoadedModel, mode: DecodingMode, cfg: EvalConfig, note: Callable[[str], None]
) -> dict[str, TimedDecoder]:
    """Return the decoders to time by name, in the order of the report.

    They are the model with its draft, plain decoding and `generate`. With dynamic trees the fixed
    tree is added, with a merged draft each of its parts, and for single rows `extra_baselines`.

    Args:
        cfg: says whether `generate` is timed, and which `extra_baselines`.

    Raises:
        TargetModelError: the model cannot decode in batches.
    """
    target_model, tree = model.target_model, model.tree
    if mode.batch_size > 1 and not BatchDecoder(target_model).can_batch:
        raise TargetModelError("longrope models can't decode in batches; set batch_size: 1")
    shared = target_model.new_kv_cache()

    def loop(proposer: Proposer | None, tree: Tree | None, description: str) -> LoopDecoder:
        rule = mode.baseline_rule if proposer is None else mode.rule
        # decoders of single rows share one KV cache, since they answer one after the other
        decoder: Decoder | BatchDecoder = Decoder(target_model, proposer, tree, shared)
        if mode.batch_size > 1:
            decoder = BatchDecoder(target_model, proposer, tree)
        return LoopDecoder(decoder, mode, rule, f"the same decoding loop with {description}")

    decoders: dict[str, TimedDecoder] = {}
    if model.proposer is not None:
        decoders[TREE] = loop(model.proposer, tree, "the draft")
    decoders[PLAIN] = loop(None, None, "the empty tree")
    if cfg.generate:
        description = f"generate, {_describe_sampling(mode)}, with its own cache"
        decoders[GENERATE] = GenerateDecoder(target_model, mode, description)
    extra_decoders: dict[str, TimedDecoder] = {}
    if tree is not None and model.fixed_proposer is not None:
        trees = f"a tree of {tree.size} nodes"
        if model.dynamic is not None:
            trees = "dynamic trees"
            same = f"the same tree of {tree.size} nodes in every step"
            extra_decoders[FIXED_TREE] = loop(model.fixed_proposer, tree, same)
        if model.heads is not None and model.lookup is not None:
            extra_decoders[HEADS_ALONE] = loop(model.heads, tree, f"the heads alone, {trees}")
            extra_decoders[LOOKUP_ALONE] = loop(
                model.lookup, None, "the draft without training alone"
            )
    if mode.batch_size == 1:
        extra_decoders |= extra_baselines(target_model, mode, cfg, note)
    return decoders | dict(sorted(extra_decoders.items()))


def _describe_sampling(mode: DecodingMode) -> str:
    if mode.acceptance == "greedy":
        return "greedy"
    return f"sampling at temperature {mode.temperature:g}"


def extra_baselines(
    target_model: TargetModel, mode: DecodingMode, cfg: EvalConfig, note: Callable[[str], None]
) -> dict[str, GenerateDecoder]:
    """Return the baselines for single rows: prompt-lookup decoding if `cfg` asks for it, and
    assisted generation if it has an `assistant_model`.

    Each baseline first generates a few tokens as a test, since some architectures' caches cannot be
    cropped. A baseline that fails is left out, with a line to `note`.
    """
    baselines: dict[str, GenerateDecoder] = {}
    how = _describe_sampling(mode)
    if cfg.prompt_lookup:
        description = f"prompt-lookup decoding, {how}, up to {LOOKUP_TOKENS} tokens copied per step"
        baselines[PROMPT_LOOKUP] = GenerateDecoder(
            target_model, mode, description, prompt_lookup_num_tokens=LOOKUP_TOKENS
        )
    if cfg.assistant_model is not None:
        assistant = _load_assistant(cfg.assistant_model, target_model, mode)
        description = f"assisted generation, {how}, with {cfg.assistant_model}"
        baselines[ASSISTED] = GenerateDecoder(
            target_model, mode, description, assistant_model=assistant
        )
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
    assistant.eos_ids = target_model.eos_ids  # valid ids, since both have the same vocabulary
    assistant.model.generation_config = _bare_config(assistant, mode)
    return assistant.model

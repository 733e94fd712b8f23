"""Time decoders on questions: the tree, plain decoding, and `generate` of transformers.

Every prompt is decoded by all of them before the next one, in an order that rotates, so that a busy machine slows all
of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, DataError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer, TurnRecord
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import load_backbone

PLAIN, TREE, GENERATE, PROMPT_LOOKUP, ASSISTED = "plain", "tree", "generate", "prompt_lookup", "assisted"

WARM_UP_TOKENS = 64
#: Tokens that prompt-lookup decoding copies at most per step, its authors' default.
LOOKUP_TOKENS = 10
#: Plain decoding steps that take so many times longer than others mean that the machine is busy. Longer prompts and
#: noise account for much less.
SLOW_FACTOR = 3.0
#: Shorter answers are too noisy for that.
MIN_STEPS = 8

Turns = Sequence[TurnRecord | SkippedTurn]


class Answerer(Protocol):
    """A decoder that answers a prompt greedily and measures it."""

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Generate up to `max_new_tokens` tokens, the first eos included."""


class SpeedTest:
    """Asks questions and times every decoder on every turn.

    Args:
        model: backbone, and draft and tree if any.
        chat: turns messages into prompts.
        max_new_tokens: longest answer in tokens.
        extra: further baselines by name, beside plain decoding and `generate`.
    """

    def __init__(
        self,
        model: LoadedModel,
        chat: ChatEncoder,
        max_new_tokens: int,
        extra: Mapping[str, Answerer] | None = None,
    ) -> None:
        self._backbone = model.backbone
        self._chat = chat
        self._max_new_tokens = max_new_tokens
        self._answerers: dict[str, Answerer] = {
            PLAIN: LoopAnswerer(Decoder(model.backbone)),
            GENERATE: GenerateAnswerer(model.backbone),
            **(extra or {}),
        }
        if model.draft is not None:
            self._answerers[TREE] = LoopAnswerer(Decoder(model.backbone, model.draft, model.tree))

    @property
    def names(self) -> list[str]:
        """Names of the decoders."""
        return sorted(self._answerers)

    def warm_up(self, questions: Sequence[Question], on_answer: Callable[[], None] = lambda: None) -> None:
        """Answer the first turn of every question with every decoder, untimed; calls `on_answer` after each."""
        tokens = min(WARM_UP_TOKENS, self._max_new_tokens)
        for question in questions:
            prompt = self._chat.prompt([Message("user", question.turns[0])])
            for answerer in self._answerers.values():
                if self._fits(prompt):
                    answerer.answer(prompt, tokens)
                on_answer()

    def run(
        self,
        questions: Sequence[Question],
        on_turn: Callable[[TurnRecord | SkippedTurn], None],
        completed: Mapping[int | str, Turns] | None = None,
        on_answer: Callable[[TimedAnswer], None] = lambda answer: None,
    ) -> tuple[list[TurnRecord], list[SkippedTurn]]:
        """Time every decoder on every turn of every question.

        The plain answer becomes the history of later turns for all decoders, so that all get the same prompts. A turn
        whose prompt and longest answer do not fit the context is skipped, and so are the turns after it.

        Args:
            on_turn: called with each turn when it is done.
            completed: turns of questions that an interrupted evaluation has measured; these are not asked again.
            on_answer: called with each answer of each decoder, between two measurements.

        Raises:
            DataError: no turn fits.
        """
        records: list[TurnRecord] = []
        skipped: list[SkippedTurn] = []
        for question in questions:
            earlier = (completed or {}).get(question.question_id)
            if earlier is not None:
                records += [turn for turn in earlier if isinstance(turn, TurnRecord)]
                skipped += [turn for turn in earlier if isinstance(turn, SkippedTurn)]
                continue
            history: list[Message] = []
            for turn, text in enumerate(question.turns, start=1):
                history.append(Message("user", text))
                prompt = self._chat.prompt(history)
                if not self._fits(prompt):
                    for later in range(turn, len(question.turns) + 1):
                        skipped.append(SkippedTurn(question.question_id, later, len(prompt)))
                        on_turn(skipped[-1])
                    break
                record = self._measure(question, turn, prompt, len(records), on_answer)
                records.append(record)
                on_turn(record)
                history.append(Message("assistant", self._text(record.plain.tokens)))
        if not records:
            shortest = min(turn.prompt_tokens for turn in skipped)
            raise DataError(
                f"no question fits the context of {self._backbone.max_context} tokens: {self._max_new_tokens} are "
                f"reserved for the answer, and the shortest prompt has {shortest}.\n"
                "Set --max-new-tokens lower, or use shorter questions."
            )
        return records, skipped

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self._max_new_tokens <= self._backbone.max_context

    def _measure(
        self,
        question: Question,
        turn: int,
        prompt: list[int],
        rotation: int,
        on_answer: Callable[[TimedAnswer], None] = lambda answer: None,
    ) -> TurnRecord:
        names = self.names
        first = rotation % len(names)
        timed: dict[str, TimedAnswer] = {}
        for name in names[first:] + names[:first]:
            timed[name] = self._answerers[name].answer(prompt, self._max_new_tokens)
            on_answer(timed[name])
        tree = timed.get(TREE)
        reported = timed[PLAIN] if tree is None else tree
        return TurnRecord(
            question.question_id,
            question.category,
            turn,
            tuple(prompt),
            tree,
            timed[PLAIN],
            timed[GENERATE],
            text=self._text(reported.tokens),
            others={name: answer for name, answer in timed.items() if name not in (TREE, PLAIN, GENERATE)},
            asked=question.turns[turn - 1],
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._backbone.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


class SlowStepDetector:
    """Notices when decoding steps take several times longer than at another time of the run.

    Another process on the machine causes that. Two answers in a row have to agree, so that short pauses don't count.

    Args:
        device_type: "cpu" or "cuda", named in the note.

    Attributes:
        notes: at most one note for the user.
    """

    def __init__(self, device_type: str) -> None:
        self.notes: list[str] = []
        self._device = "CPU" if device_type == "cpu" else "GPU"
        self._last: float | None = None
        self._fastest, self._slowest = float("inf"), 0.0  # seconds of a step, kept up by two answers in a row

    def observe(self, plain: TimedAnswer) -> str | None:
        """Take a plain answer into account; returns a note if its steps are the first that stand out."""
        if plain.steps < MIN_STEPS or self.notes:
            return None
        step = plain.decode_seconds / plain.steps
        last, self._last = self._last, step
        if last is None:
            return None
        low, high = min(last, step), max(last, step)
        if low > SLOW_FACTOR * self._fastest:
            change = f"decoding steps are {low / self._fastest:.0f}x slower than at the start"
        elif SLOW_FACTOR * high < self._slowest:
            change = f"decoding steps were {self._slowest / high:.0f}x slower at the start"
        else:
            self._fastest, self._slowest = min(self._fastest, high), max(self._slowest, low)
            return None
        self.notes.append(f"{change}: another process may be using the {self._device}; timings are unreliable")
        return self.notes[0]


class LoopAnswerer:
    """This project's decoding loop, with a tree or, without a draft, with the empty one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Generate up to `max_new_tokens` tokens, the first eos included."""
        started = time.perf_counter()
        output = self._decoder.generate(list(prompt_ids), max_new_tokens)
        seconds = time.perf_counter() - started
        return TimedAnswer(tuple(output.tokens), seconds, output.prefill_seconds, output.steps, tuple(output.accepted))


class GenerateAnswerer:
    """Greedy `generate` of transformers, with its own cache.

    The backbone's generation config is replaced by a bare one: a checkpoint may bring a repetition penalty or a
    sampling temperature, which `generate` takes from there. The old config is not restored, since nothing else here
    reads it: `Backbone.eos_ids` were read before, and the bare config has them too.

    Args:
        options: further arguments of `generate`, such as an assistant model.
    """

    def __init__(self, backbone: Backbone, **options: Any) -> None:
        self._backbone = backbone
        self._options = options
        backbone.model.generation_config = _bare_config(backbone)

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Generate up to `max_new_tokens` tokens, the first eos included."""
        started = time.perf_counter()
        prompt = torch.tensor([list(prompt_ids)], device=self._backbone.device)
        with torch.inference_mode():
            output = self._backbone.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **self._options
            )
        tokens = output[0, len(prompt_ids) :].tolist()
        return TimedAnswer(tuple(tokens), time.perf_counter() - started)


def _bare_config(backbone: Backbone) -> GenerationConfig:
    eos = list(backbone.eos_ids) or None
    pad = backbone.tokenizer.pad_token_id
    if pad is None:
        pad = eos[0] if eos else 0
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, eos_token_id=eos, pad_token_id=pad)


def extra_baselines(
    backbone: Backbone, assistant_model: str | None, *, prompt_lookup: bool, note: Callable[[str], None]
) -> dict[str, GenerateAnswerer]:
    """Return the optional baselines: prompt-lookup decoding, and assisted generation if a draft model is named.

    Each generates a few tokens first: some architectures' caches cannot be cropped, and a baseline that does not run
    is left out, with a line to `note`.

    Raises:
        BackboneError: the draft model cannot be loaded, or has a different tokenizer.
    """
    baselines: dict[str, GenerateAnswerer] = {}
    if prompt_lookup:
        baselines[PROMPT_LOOKUP] = GenerateAnswerer(backbone, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    if assistant_model is not None:
        baselines[ASSISTED] = GenerateAnswerer(backbone, assistant_model=_load_assistant(assistant_model, backbone))
    prompt = list(range(min(4, backbone.vocab_size)))
    for name, answerer in list(baselines.items()):
        try:
            answerer.answer(prompt, 3)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            note(f"baseline {name}: not supported by transformers for this backbone, left out ({error})")
            del baselines[name]
    return baselines


def _load_assistant(name: str, backbone: Backbone) -> torch.nn.Module:
    assistant = load_backbone(name, dtype=backbone.dtype, device=backbone.device)
    if assistant.tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
        raise BackboneError(
            f"assistant_model {name}: its tokenizer differs from the backbone's; use a smaller model of the same family"
        )
    assistant.model.generation_config = _bare_config(assistant)
    return assistant.model


def describe_baseline(name: str, version: str, assistant_model: str | None) -> str:
    """Describe a baseline of transformers `version` for the report."""
    descriptions = {
        GENERATE: "generate, greedy, with its own cache",
        PROMPT_LOOKUP: f"prompt-lookup decoding, greedy, up to {LOOKUP_TOKENS} tokens copied per step",
        ASSISTED: f"assisted generation, greedy, with {assistant_model}",
    }
    return f"transformers {version} {descriptions[name]}"

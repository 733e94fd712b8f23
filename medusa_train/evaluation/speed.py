"""Times decoders on questions: the tree, the empty tree and those of transformers, interleaved in one process.

Knows nothing of files, reports or exactness. A busy machine shifts all decoders alike when they take turns, so each
prompt is decoded by all of them before the next one, in an order that rotates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from medusa_train.checkpoint.load import LoadedModel
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, DataError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer, TurnRecord
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import load_backbone

WARM_UP_TOKENS = 64

PLAIN, TREE = "plain", "tree"
Turns = Sequence[TurnRecord | SkippedTurn]


class Answerer(Protocol):
    """Anything that answers a prompt greedily and says what it cost."""

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode up to `max_new_tokens` tokens, the first eos included."""


class LoopAnswerer:
    """This project's decoding loop, with a tree or (draft None) with the empty one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """See `Answerer`."""
        started = time.perf_counter()
        made = self._decoder.generate(list(prompt_ids), max_new_tokens)
        seconds = time.perf_counter() - started
        return TimedAnswer(tuple(made.tokens), seconds, made.prefill_seconds, made.steps, tuple(made.accepted))


class SpeedTest:
    """Asks the questions and times every decoder on every turn; `further` are baselines beside plain and generate."""

    def __init__(
        self,
        subject: LoadedModel,
        chat: ChatEncoder,
        max_new_tokens: int,
        further: Mapping[str, Answerer] | None = None,
    ) -> None:
        self._backbone = subject.backbone
        self._chat = chat
        self._max_new_tokens = max_new_tokens
        self._answerers: dict[str, Answerer] = {
            PLAIN: LoopAnswerer(Decoder(subject.backbone)),
            GENERATE: GenerateAnswerer(subject.backbone),
            **(further or {}),
        }
        if subject.draft is not None:
            self._answerers[TREE] = LoopAnswerer(Decoder(subject.backbone, subject.draft, subject.tree))

    def warm_up(self, questions: Sequence[Question]) -> None:
        """Let every decoder answer the first turns once, briefly, unmeasured."""
        tokens = min(self._max_new_tokens, WARM_UP_TOKENS)
        for question in questions:
            prompt = self._chat.prompt([Message("user", question.turns[0])])
            if self._fits(prompt):
                for answerer in self._answerers.values():
                    answerer.answer(prompt, tokens)

    def run(
        self,
        questions: Sequence[Question],
        on_turn: Callable[[TurnRecord | SkippedTurn], None],
        measured: Mapping[int | str, Turns] | None = None,
    ) -> tuple[list[TurnRecord], list[SkippedTurn]]:
        """Ask every turn of every question.

        The plain pass's answers are the history of later turns, for all decoders, so that all see one prompt. A turn
        whose prompt and answer (`max_new_tokens`) do not fit the context is skipped, with the turns that follow it.
        `on_turn` is told of each turn when it is done. Questions that an earlier evaluation has `measured` are not
        asked again; their turns are taken over in their place.

        Raises DataError when no turn fits.
        """
        records: list[TurnRecord] = []
        skipped: list[SkippedTurn] = []
        for question in questions:
            for earlier in (measured or {}).get(question.question_id, ()):
                if isinstance(earlier, TurnRecord):
                    records.append(earlier)
                else:
                    skipped.append(earlier)
            if question.question_id in (measured or {}):
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
                record = self._measure(question, turn, prompt, rotation=len(records))
                records.append(record)
                on_turn(record)
                history.append(Message("assistant", self._text(record.plain.tokens)))
        if not records:
            shortest = min(turn.prompt_tokens for turn in skipped)
            raise DataError(
                f"no question fits: the model reads {self._backbone.max_context} tokens, of which "
                f"{self._max_new_tokens} are kept for the answer, and the shortest prompt has {shortest}.\n"
                "Set --max-new-tokens lower, or use shorter questions."
            )
        return records, skipped

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self._max_new_tokens <= self._backbone.max_context

    def _measure(self, question: Question, turn: int, prompt: list[int], rotation: int) -> TurnRecord:
        names = sorted(self._answerers)
        first = rotation % len(names)
        timed = {
            name: self._answerers[name].answer(prompt, self._max_new_tokens) for name in names[first:] + names[:first]
        }
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


#: Tokens that prompt-lookup decoding copies at most per step, as its authors set it.
LOOKUP_TOKENS = 10

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt_lookup", "assisted"


class GenerateAnswerer:
    """`generate` of transformers: greedy, with its own cache, and with nothing else switched on.

    The backbone's generation config is replaced by a bare one, since a checkpoint may bring a repetition penalty or
    a sampling temperature, and `generate` fills gaps from there: it would no longer be greedy decoding of this model.
    The old one is not put back: the backbone was loaded for this evaluation alone, its own `eos_ids` were read before
    and stand in the bare config too, and nothing else here asks for the rest.

    Args:
        how: further arguments of `generate`, such as an assistant model.
    """

    def __init__(self, backbone: Backbone, **how: Any) -> None:
        self._backbone = backbone
        self._how = how
        backbone.model.generation_config = _bare_config(backbone)

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode up to `max_new_tokens` tokens, the first eos included."""
        started = time.perf_counter()
        prompt = torch.tensor([list(prompt_ids)], device=self._backbone.device)
        with torch.inference_mode():
            made = self._backbone.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **self._how
            )
        tokens = made[0, len(prompt_ids) :].tolist()
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
    """Prompt-lookup decoding (unless switched off), and assisted generation where a draft model is named.

    Each decodes a few tokens to begin with: some architectures' caches can't be cut back, and what can't run is left
    out with a line to `note`.

    Raises:
        BackboneError: the draft model can't be loaded, or speaks in other tokens.
    """
    found: dict[str, GenerateAnswerer] = {}
    if prompt_lookup:
        found[PROMPT_LOOKUP] = GenerateAnswerer(backbone, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    if assistant_model is not None:
        found[ASSISTED] = GenerateAnswerer(backbone, assistant_model=_assistant(assistant_model, backbone).model)
    probe = list(range(min(4, backbone.vocab_size)))
    for name, answerer in list(found.items()):
        try:
            answerer.answer(probe, 3)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            note(f"baseline {name}: transformers can't run it with this backbone, left out ({error})")
            del found[name]
    return found


def _assistant(name: str, backbone: Backbone) -> Backbone:
    assistant = load_backbone(name, dtype=backbone.dtype, device=backbone.device)
    if assistant.tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
        raise BackboneError(
            f"assistant_model {name}: its tokenizer is not the backbone's; take a smaller one of its kind"
        )
    assistant.model.generation_config = _bare_config(assistant)
    return assistant


def describe_baseline(name: str, version: str, assistant_model: str | None) -> str:
    """What a baseline of transformers is, for the report."""
    kinds = {
        GENERATE: "generate, greedy, with its own cache",
        PROMPT_LOOKUP: f"prompt-lookup decoding, greedy, up to {LOOKUP_TOKENS} tokens copied per step",
        ASSISTED: f"assisted generation, greedy, with {assistant_model}",
    }
    return f"transformers {version} {kinds[name]}"

"""The last rounds of training: the model answers, and is taught not to repeat itself and to keep what went well.

A small model that only ever saw other people's text loops when it decodes greedily. Each round it answers some
requests greedily; tokens that go on a loop are made less likely, in code ever so gently (sequence-level unlikelihood,
Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training", section 5.2), and so is the start of the last
line of a worked answer that ends early; good answers are learned from like any text, and ordinary text keeps the rest
in place.
Knows nothing of where requests come from.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from batches import Epoch, stream, to_tensors
from check import parses
from losses import held_out_losses, hidden_states
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from training import Run
from transformers import LlamaForCausalLM
from vocabulary import EOS_ID, PAD_ID, Encoded, encode_chats

LIMIT = 144  # tokens of an answer here; loops show by then
SHORT, SHORT_CODE = 64, 36  # tokens: shorter answers are no models
LOOP_WEIGHT, CODE_WEIGHT, SHORT_WEIGHT, GOOD_WEIGHT = 3.0, 0.15, 0.1, 0.5
REACH = 1.3  # of the weights' mean over the second half of the rounds, from where they were before the first
UNLIKELIHOOD = 0.5  # of the mean over all answers, against the mean loss on text
SPANS = ((8, 1), (4, 3))  # (n, m): a sequence of n tokens that occurred m times before is a loop ...
CODE_SPANS = ((8, 2), (4, 4))  # ... in code, which repeats itself by nature, these ...
INSIDE = 6  # ... and in an answer with a loop every token goes on it that is in a sequence of 6 seen before


@dataclass(frozen=True)
class Request:
    """What is asked, after which turns, whether the answer has to be code, and what is asked afterwards."""

    history: tuple[tuple[str, str], ...]
    text: str
    is_code: bool
    then: str | None = None  # asked next, once the model has answered


def repeated(tokens: Sequence[int], spans: Sequence[tuple[int, int]] = SPANS) -> list[bool]:
    """For each token whether it goes on a loop: see `SPANS` and `INSIDE`."""
    marks = [any(places) for places in zip(*(_seen(tokens, *span) for span in spans), strict=True)]
    if any(marks):
        again = _seen(tokens, INSIDE, 1)
        marks = [mark or any(again[place : place + INSIDE]) for place, mark in enumerate(marks)]
    return marks


def _seen(tokens: Sequence[int], length: int, before: int) -> list[bool]:
    """For each token whether the `length` tokens ending there occurred `before` times before."""
    marks = [False] * len(tokens)
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(length, len(tokens) + 1):
        span = tuple(tokens[end - length : end])
        marks[end - 1] = seen[span] >= before
        seen[span] += 1
    return marks


@torch.no_grad()
def greedy_answers(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The greedy answers to tokenised prompts, eos included where it came within `LIMIT` tokens."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: all answers start in the same column
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    output = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=LIMIT, do_sample=False)
    return [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in output[:, width:].tolist()]


def polish(
    run: Run,
    tokenizer: Tokenizer,
    requests: Callable[[int], Sequence[Request]],
    epoch: Epoch,
    held_out: dict[str, Sequence[Encoded]],
    log: Callable[[dict[str, object]], None],
    every: int,
    on_checkpoint: Callable[[LlamaForCausalLM], None],
) -> None:
    """Do the rounds that are left; every `every` rounds evaluate, save, call `on_checkpoint`.

    `requests(n)` are those of round n; `epoch` gives the ordinary text, as much a round as in a step before. Where the
    rounds were re-planned, so that these begin in the second half, the first state stands for those missed in the mean.
    """
    recipe = run.recipe
    speaker = LlamaForCausalLM(recipe.config()).to(run.device, torch.bfloat16).eval()
    batches = stream(epoch, recipe)
    for _ in range((run.step - recipe.steps) * recipe.accumulation):
        next(batches)
    if run.step == recipe.steps or "unpolished" not in run.kept:
        run.keep("unpolished")
    while (number := run.step - recipe.steps) < recipe.polish_rounds:
        speaker.load_state_dict(run.model.state_dict())
        text = [next(batches)[1] for _ in range(recipe.accumulation)]
        shares = polish_round(run, speaker, tokenizer, requests(number), text)
        late = number + 1 - recipe.polish_rounds // 2  # how many rounds of the second half are done
        if late > 0:
            run.keep("mean", 1 / late)
        entry: dict[str, object] = {"step": run.step, **{k: round(v, 3) for k, v in shares.items()}}
        if (number + 1) % every == 0 or number + 1 == recipe.polish_rounds:
            entry["held_out"] = {
                kind: held_out_losses(run.model, chats, recipe.micro_batch) for kind, chats in held_out.items()
            }
            run.save()
            on_checkpoint(run.model)
        log(entry)


def settle(run: Run) -> None:
    """Give the model the mean of the second half's weights, moved `REACH` times as far from the unpolished ones.

    Single states differ from round to round by chance; what they have in common is what was learned, and the mean of
    it falls short of it (as moving along the difference of two models' weights does in Ilharco et al. 2023, "Editing
    Models with Task Arithmetic").
    """
    if "mean" not in run.kept:
        return
    before, mean = run.kept["unpolished"], run.kept["mean"]
    run.model.load_state_dict({name: torch.lerp(before[name], mean[name], REACH) for name in mean})


def polish_round(
    run: Run,
    speaker: LlamaForCausalLM,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    text: Sequence[Sequence[Encoded]],
) -> dict[str, float]:
    """One round: `speaker` (a bf16 copy of the model) answers, one optimizer step; the shares seen."""
    prompts, answers = _ask(speaker, tokenizer, requests)
    later = [
        Request((*request.history, (request.text, tokenizer.decode(answer))), request.then, request.is_code)
        for request, answer in zip(requests, answers, strict=True)
        if request.then and answer[-1] == EOS_ID
    ]
    if later:
        more_prompts, more_answers = _ask(speaker, tokenizer, later)
        requests, prompts, answers = [*requests, *later], prompts + more_prompts, answers + more_answers
    chats: list[Encoded] = []
    signs: list[list[float]] = []
    counts: Counter[str] = Counter()
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        weights, kinds = judge_answer(tokenizer, answer, request.is_code)
        counts.update(kinds)
        chats.append(Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        signs.append([0.0] * len(prompt) + weights)
    _step(run, chats, signs, text)
    shares = {kind: counts[kind] / len(requests) for kind in ("looping", "cut", "short", "broken_code", "good")}
    return {**shares, "median": float(statistics.median(map(len, answers)))}


def _ask(
    speaker: LlamaForCausalLM, tokenizer: Tokenizer, requests: Sequence[Request]
) -> tuple[list[list[int]], list[list[int]]]:
    """(the tokenised prompts, the greedy answers to them)."""
    chats = encode_chats(tokenizer, [[*request.history, (request.text, "")] for request in requests])
    prompts = [chat.ids[:-1] for chat in chats]  # without the end of the empty answer
    return prompts, greedy_answers(speaker, prompts)


def judge_answer(tokenizer: Tokenizer, answer: Sequence[int], is_code: bool) -> tuple[list[float], set[str]]:
    """(a weight per token, above zero = likelier, below = less likely; what was found about the answer).

    Loops in code weigh `CODE_WEIGHT`, a twentieth of those in problems: its brackets, line ends and indentation are in
    them too, and ten rounds that unlearned them at full weight took the share that parses from four fifths to a
    quarter. A short problem makes the first token of its last line less likely; broken and short code nothing.
    """
    marks = repeated(answer, CODE_SPANS if is_code else SPANS)
    text = tokenizer.decode(list(answer), skip_special_tokens=True)
    found = {
        "looping": any(marks),
        "cut": answer[-1] != EOS_ID,
        "broken_code": is_code and not parses(text),
        "short": len(answer) < (SHORT_CODE if is_code else SHORT),
    }
    kinds = {kind for kind, is_so in found.items() if is_so}
    if not kinds:
        return [GOOD_WEIGHT] * len(answer), {"good"}
    weights = [-(CODE_WEIGHT if is_code else LOOP_WEIGHT) if mark else 0.0 for mark in marks]
    if "short" in kinds and not is_code:
        weights[last_line(tokenizer, answer)] -= SHORT_WEIGHT
    return weights, kinds


def last_line(tokenizer: Tokenizer, answer: Sequence[int]) -> int:
    """The index of the token that starts an answer's last line."""
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    return max((index + 1 for index, token in enumerate(answer[:-1]) if token == newline), default=0)


def _step(
    run: Run, chats: Sequence[Encoded], signs: Sequence[Sequence[float]], text: Sequence[Sequence[Encoded]]
) -> None:
    """One optimizer step: on the weighted tokens of `chats` and on the answers of `text`, looking ahead in both."""
    device = run.device
    rng = Random(f"lookahead {run.recipe.seed} {run.step}")
    total = sum(sum(chat.assistant) for chat in chats)
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        ids, _ = to_tensors([chats[row] for row in rows], device)
        sign = torch.zeros(ids.shape, device=device)
        for place, row in enumerate(rows):
            sign[place, : len(signs[row])] = torch.tensor(signs[row], device=device)
        losses, further = _losses(run, ids, sign, rng)
        likely, unlikely = losses.where(sign[:, 1:] > 0, 0.0).sum(), losses.where(sign[:, 1:] < 0, 0.0).sum()
        ((likely + further) / total + UNLIKELIHOOD * unlikely / len(chats)).backward()
    loaded = [to_tensors(batch, device) for batch in text]
    answered = sum(int((kinds == 2).sum()) for _, kinds in loaded)
    for ids, kinds in loaded:
        losses, further = _losses(run, ids, (kinds == 2).float(), rng)
        ((losses.sum() + further) / answered).backward()
    run.apply(run.recipe.rate(run.step))
    run.step += 1


def _losses(run: Run, ids: Tensor, sign: Tensor, rng: Random) -> tuple[Tensor, Tensor]:
    """(signed losses [B, T-1], the weighted sum of what lies further ahead, where the sign is positive)."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = hidden_states(run.model, ids)
        logits = run.model.lm_head(hidden).float()
        likelier = sign[:, 1:].clamp(min=0)
        further = run.lookahead.losses(hidden, run.model.lm_head, ids, likelier, rng)
    return signed_losses(logits, ids, sign), run.recipe.lookahead_weight * further


def signed_losses(logits: Tensor, ids: Tensor, sign: Tensor) -> Tensor:
    """Per next token [B, T-1]: -w log p where its weight w is positive, -c |w| log(1 - p) where it is negative.

    c, a share of 1 over the row's tokens of negative weight, goes with (1 - p)^2, as in focal losses: less likely
    becomes what was chosen where there was a choice. Brackets, line ends and indentation, which are in every loop of
    code and nearly certain in it, stay as they are. Where all is certain the share is spread evenly.

    `logits` is [B, T-1, V]; `ids` and `sign`, the weights, are [B, T], aligned with each other.
    """
    log_p = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    log_rest = torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    weights = sign[:, 1:]
    choice = ((1 - log_p.detach().exp()) ** 2 + 1e-4) * (weights < 0)
    share = choice / choice.sum(dim=1, keepdim=True).clamp(min=1e-12)
    return -torch.where(weights > 0, log_p, share * log_rest) * weights.abs()

"""Fine-tune the tiny test model on its own greedy answers so that it stops repeating itself.

A small model trained on text alone loops when it decodes greedily. In each round it answers some
requests; repeated tokens become less likely (sequence-level unlikelihood, Welleck et al. 2020,
"Neural Text Generation with Unlikelihood Training"), and so does the start of the last line of a
worked answer that is too short. Good answers are trained on like text, and ordinary text keeps
everything else in place.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Sequence
from random import Random

import torch
from chats import EOS_ID, PAD_ID, EncodedChat, encode_chats, stream_batches, to_tensors
from corpus import Corpus, Request
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from training import TrainingRun, hidden_states
from transformers import LlamaForCausalLM

MAX_NEW_TOKENS = 144
MIN_TOKENS, MIN_CODE_TOKENS = 64, 36  # shorter answers are not trained on as good ones
LOOP_WEIGHT, CODE_LOOP_WEIGHT, SHORT_WEIGHT, GOOD_WEIGHT = 3.0, 0.15, 0.1, 0.5
UNLIKELIHOOD_WEIGHT = 0.5  # of the mean over answers, against the mean loss on text
LOOP_SPANS = ((8, 1), (4, 3))  # (n, m): an n-gram of tokens that occurred m times before is a loop
CODE_LOOP_SPANS = ((8, 2), (4, 4))  # code repeats itself more
LOOP_NGRAM = 6  # in an answer with a loop, every repeated 6-gram counts as part of it
# factor of the step from the weights before the rounds to the mean of the later ones
EXTRAPOLATION = 1.3


def fine_tune(run: TrainingRun, corpus: Corpus) -> None:
    """Run the rounds, then set the model's weights to the extrapolated mean of the second half's.

    Single rounds differ by chance; their mean keeps what they have in common. It falls short of the
    full change, so the step to it is lengthened, as in Ilharco et al. 2023, "Editing Models with
    Task Arithmetic".
    """
    recipe = run.recipe
    generator = LlamaForCausalLM(recipe.model_config()).to(run.device, torch.bfloat16).eval()
    text = stream_batches(
        lambda number: corpus.brief_epoch(10_000 + number), recipe.micro_batch, recipe.seed
    )
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    mean = before
    for number in range(recipe.unlikelihood_rounds):
        generator.load_state_dict(run.model.state_dict())
        requests = corpus.requests(recipe.unlikelihood_requests, number)
        shares = run_round(
            run,
            generator,
            corpus.tokenizer,
            requests,
            [next(text) for _ in range(recipe.accumulation)],
        )
        print(
            f"round {number + 1}: {', '.join(f'{k} {v:.3g}' for k, v in shares.items())}",
            flush=True,
        )
        averaged = number + 1 - recipe.unlikelihood_rounds // 2
        if averaged > 0:
            weights = run.model.state_dict()
            mean = {name: torch.lerp(mean[name], weights[name], 1 / averaged) for name in mean}
    run.model.load_state_dict(
        {name: torch.lerp(before[name], mean[name], EXTRAPOLATION) for name in mean}
    )


def run_round(
    run: TrainingRun,
    generator: LlamaForCausalLM,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    text: Sequence[Sequence[EncodedChat]],
) -> dict[str, float]:
    """Answer the requests and their follow-ups with `generator`, take one optimizer step, return
    shares of answers.
    """
    prompts, answers = greedy_answers(generator, tokenizer, requests)
    follow_ups = [
        Request(
            (*request.history, (request.text, tokenizer.decode(ids))),
            request.follow_up,
            request.is_code,
        )
        for request, ids in zip(requests, answers, strict=True)
        if request.follow_up and ids[-1] == EOS_ID
    ]
    if follow_ups:
        more_prompts, more_answers = greedy_answers(generator, tokenizer, follow_ups)
        requests, prompts, answers = (
            [*requests, *follow_ups],
            prompts + more_prompts,
            answers + more_answers,
        )
    chats: list[EncodedChat] = []
    weights: list[list[float]] = []
    counts: Counter[str] = Counter()
    for request, prompt, ids in zip(requests, prompts, answers, strict=True):
        token_weights, labels = judge_answer(tokenizer, ids, request.is_code)
        counts.update(labels)
        chats.append(EncodedChat([*prompt, *ids], [False] * len(prompt) + [True] * len(ids)))
        weights.append([0.0] * len(prompt) + token_weights)
    update(run, chats, weights, text)
    shares = {
        label: counts[label] / len(requests)
        for label in ("looping", "cut", "short", "broken_code", "good")
    }
    return {**shares, "median_tokens": float(statistics.median(map(len, answers)))}


def greedy_answers(
    generator: LlamaForCausalLM, tokenizer: Tokenizer, requests: Sequence[Request]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the requests as token ids, and greedy answers of up to MAX_NEW_TOKENS, EOS included
    where it came.
    """
    chats = encode_chats(
        tokenizer, [[*request.history, (request.text, "")] for request in requests]
    )
    prompts = [chat.ids[:-1] for chat in chats]  # without the EOS of the empty answer
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD_ID)
    mask = torch.zeros_like(ids)
    # padded on the left: all answers start in the same column
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = next(generator.parameters()).device
    with torch.no_grad():
        output = generator.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
    rows = output[:, width:].tolist()
    return prompts, [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]


def judge_answer(
    tokenizer: Tokenizer, answer: Sequence[int], is_code: bool
) -> tuple[list[float], set[str]]:
    """Return a weight per token (positive: make likelier, negative: less likely) and labels of the
    answer.

    Loops in code get a twentieth of the weight: they contain brackets, line ends and indentation,
    and ten rounds at full weight took the share of code that parses from four fifths to a quarter.
    In a worked answer that is too short the first token of the last line becomes less likely.
    """
    marks = repeated(answer, CODE_LOOP_SPANS if is_code else LOOP_SPANS)
    text = tokenizer.decode(list(answer), skip_special_tokens=True)
    conditions = {
        "looping": any(marks),
        "cut": answer[-1] != EOS_ID,
        "broken_code": is_code and not parses(text),
        "short": len(answer) < (MIN_CODE_TOKENS if is_code else MIN_TOKENS),
    }
    labels = {label for label, holds in conditions.items() if holds}
    if not labels:
        return [GOOD_WEIGHT] * len(answer), {"good"}
    weights = [-(CODE_LOOP_WEIGHT if is_code else LOOP_WEIGHT) if mark else 0.0 for mark in marks]
    if "short" in labels and not is_code:
        newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        last_line = max(
            (index + 1 for index, token in enumerate(answer[:-1]) if token == newline), default=0
        )
        weights[last_line] -= SHORT_WEIGHT
    return weights, labels


def parses(text: str) -> bool:
    """Return whether a text is valid Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def repeated(tokens: Sequence[int], spans: Sequence[tuple[int, int]] = LOOP_SPANS) -> list[bool]:
    """Mark the tokens that continue a loop, as LOOP_SPANS and LOOP_NGRAM define it."""
    marks = [
        any(flags)
        for flags in zip(*(ends_repeated_ngram(tokens, *span) for span in spans), strict=True)
    ]
    if any(marks):
        ends = ends_repeated_ngram(tokens, LOOP_NGRAM, 1)
        marks = [mark or any(ends[index : index + LOOP_NGRAM]) for index, mark in enumerate(marks)]
    return marks


def ends_repeated_ngram(tokens: Sequence[int], length: int, times: int) -> list[bool]:
    """Mark the tokens at the end of an n-gram of `length` that occurred at least `times` times
    before.
    """
    marks = [False] * len(tokens)
    counts: Counter[tuple[int, ...]] = Counter()
    for end in range(length, len(tokens) + 1):
        ngram = tuple(tokens[end - length : end])
        marks[end - 1] = counts[ngram] >= times
        counts[ngram] += 1
    return marks


def update(
    run: TrainingRun,
    chats: Sequence[EncodedChat],
    weights: Sequence[Sequence[float]],
    text: Sequence[Sequence[EncodedChat]],
) -> None:
    """Take one optimizer step on the weighted tokens of `chats` and on the assistant tokens of
    `text`.
    """
    rng = Random(f"lookahead {run.recipe.seed} {run.step}")
    answer_tokens = sum(sum(chat.assistant) for chat in chats)
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        ids, _ = to_tensors([chats[row] for row in rows], run.device)
        batch_weights = torch.zeros(ids.shape, device=run.device)
        for index, row in enumerate(rows):
            batch_weights[index, : len(weights[row])] = torch.tensor(
                weights[row], device=run.device
            )
        losses, ahead = weighted_losses(run, ids, batch_weights, rng)
        likely = losses.where(batch_weights[:, 1:] > 0, 0.0).sum()
        unlikely = losses.where(batch_weights[:, 1:] < 0, 0.0).sum()
        ((likely + ahead) / answer_tokens + UNLIKELIHOOD_WEIGHT * unlikely / len(chats)).backward()
    loaded = [to_tensors(batch, run.device) for batch in text]
    text_tokens = sum(int((kinds == 2).sum()) for _, kinds in loaded)
    for ids, kinds in loaded:
        losses, ahead = weighted_losses(run, ids, (kinds == 2).float(), rng)
        ((losses.sum() + ahead) / text_tokens).backward()
    run.optimizer_step()


def weighted_losses(
    run: TrainingRun, ids: Tensor, weights: Tensor, rng: Random
) -> tuple[Tensor, Tensor]:
    """Return the losses [B, T-1] of `signed_losses`, and the multi-token prediction loss of
    positive weights.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = hidden_states(run.model, ids)
        logits = run.model.lm_head(hidden).float()
        ahead = run.lookahead.loss(hidden, run.model.lm_head, ids, weights[:, 1:].clamp(min=0), rng)
    return signed_losses(logits, ids, weights), run.recipe.lookahead_weight * ahead


def signed_losses(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return per next token -w log p for a positive weight w, and -c |w| log(1 - p) for a negative
    one.

    The c of a row sum to 1 over its tokens of negative weight and are proportional to (1 - p)^2, as
    in a focal loss: tokens chosen with near certainty (brackets, line ends and indentation in a
    loop of code) stay as they are. If all are certain, c is uniform.

    Args:
        logits: [B, T-1, V].
        ids: [B, T].
        weights: [B, T], aligned with `ids`.
    """
    log_p = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    log_not_p = torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    weights = weights[:, 1:]
    uncertainty = ((1 - log_p.detach().exp()) ** 2 + 1e-4) * (weights < 0)
    share = uncertainty / uncertainty.sum(dim=1, keepdim=True).clamp(min=1e-12)
    return -torch.where(weights > 0, log_p, share * log_not_p) * weights.abs()

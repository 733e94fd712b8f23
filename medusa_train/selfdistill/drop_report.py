"""What a user is told about prompts without any kept answer: how many, why, and what to do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.errors import DataError
from medusa_train.selfdistill.output import dropped_path
from medusa_train.selfdistill.replay import is_asked_again

MOST = 0.5  # share of the prompts, above which dropping them is worth a warning


def most_dropped(
    output: Path, kept: int, reasons: Counter[str], cfg: SelfDistillConfig
) -> str | None:
    """Return a warning if most prompts of `output` have no kept answer, or some got reasoning in its
    place; else None.

    Args:
        kept: number of conversations in the file.
        reasons: number of the other prompts by the reason for which they were dropped.
    """
    count = reasons.total()
    if count <= MOST * (count + kept) and not reasons["only reasoning"]:
        return None
    head = f"warning: {count:,} of {count + kept:,} prompts have no kept answer"
    return _report(head, output, reasons, cfg)


def nothing_kept(output: Path, reasons: Counter[str], cfg: SelfDistillConfig) -> DataError:
    """Return the error for an output without a single conversation; see `most_dropped`."""
    head = f"{output}: no answer was kept, so there is no file"
    return DataError(_report(head, output, reasons, cfg))


def _report(head: str, output: Path, reasons: Counter[str], cfg: SelfDistillConfig) -> str:
    """Return `head`, a line per reason, the most frequent first, and where the prompts are listed."""
    lines = [f"{head}:" if reasons else head]
    for reason, count in reasons.most_common():
        lines.append(f"  {count:,} {reason}: {_remedy(reason, cfg)}")
    from_server = cfg.engine == "openai"
    if not all(is_asked_again(reason, from_server=from_server) for reason in reasons):
        lines.append(
            f"{dropped_path(output)} lists those that are not asked again. With other settings, choose another"
            " output=FILE.jsonl"
        )
    return "\n".join(lines)


def _remedy(reason: str, cfg: SelfDistillConfig) -> str:
    """Return what to do about prompts that were dropped for `reason`."""
    if cfg.engine == "openai":
        again = "then run the same command, which asks them again"
        remedies = {
            "refused": f"the server rejected them; see its log, {again}",
            "failed": (
                "the server did not answer in time, or ended answers for an unknown reason; see"
                f" the table above and its log, {again}"
            ),
            "only reasoning": (
                "the text came as reasoning (`reasoning_content`), without an answer; start the"
                f" server without its reasoning parser, or with the model's, {again}. If the model"
                " is not to reason, set chat_template_kwargs={enable_thinking: false}"
            ),
            "empty": f"the server sent no text; check its chat template and model, {again}",
        }
        if reason in remedies:
            return remedies[reason]
    if reason == "length":
        return f"set max_new_tokens above {cfg.max_new_tokens}, or drop_truncated=false"
    if reason == "possibly cut":
        return (
            "the server does not say that they are whole (no finish_reason, as many tokens as"
            " max_new_tokens, or reasoning that does not end); set max_new_tokens above"
            f" {cfg.max_new_tokens}, or keep them by drop_truncated=false"
        )
    if reason == "context":
        return (
            "the model's context is full; choose shorter prompts by max_chars or max_turns, or fewer"
            " max_new_tokens"
        )
    if reason == "looping":
        return (
            f"temperature is {cfg.temperature:g}, and at 0.3 to 0.7 fewer answers repeat themselves;"
            " or set drop_looping=false"
        )
    if reason == "refused":
        return "the chat template rejects these chats; choose another by chat_template"
    if reason == "empty":
        return "the model ends at once; it may need another chat_template"
    return "see docs/how-to/make-training-data.md"

"""Warnings on the target model of an export."""

import shutil
from pathlib import Path

import pytest

from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.types import ExportTarget
from medusa_train.export.write import export_run, stop_warnings
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.loading import load_target_model
from tests import chatml

IM_END_TEXT = chatml.SPECIAL[chatml.IM_END]


@pytest.mark.parametrize(
    ("of_tokenizer", "special_tokens", "template", "is_warned"),
    [
        ("<|endoftext|>", {}, chatml.TEMPLATE, True),  # the template alone names it
        ("<|endoftext|>", {"eos_token": IM_END_TEXT}, chatml.TEMPLATE, True),
        ("<|endoftext|>", {"eos_token": IM_END_TEXT}, chatml.PLAIN_TEMPLATE, True),
        (IM_END_TEXT, {}, chatml.TEMPLATE, False),  # servers read the tokenizer
        ("<|endoftext|>", {}, chatml.PLAIN_TEMPLATE, False),
    ],
)
def test_an_end_of_answers_that_servers_do_not_know_is_warned_of(
    tmp_path: Path,
    of_tokenizer: str,
    special_tokens: dict[str, str],
    template: str,
    is_warned: bool,
) -> None:
    base = chatml.write_target_model(tmp_path, template=template, eos_token=of_tokenizer)
    warnings = stop_warnings(resolve_model(None, str(base), None, special_tokens=special_tokens))
    shown = [f"answers end at {IM_END_TEXT}, " in text for text in warnings]
    assert shown == [True] * is_warned
    assert all(f"add [{chatml.IM_END}] to eos_token_id" in text for text in warnings)


@pytest.mark.parametrize(
    ("draft", "to", "is_warned"),
    [("medusa", "tgi", True), ("medusa", "transformers", False), ("eagle3", "vllm", True)],
)
def test_it_is_warned_of_wherever_a_server_reads_the_export(
    tmp_path: Path, draft: str, to: ExportTarget, is_warned: bool
) -> None:
    base = chatml.write_target_model(tmp_path / "base")
    run = chatml.write_run(tmp_path / "run", base)
    if draft == "eagle3":
        shutil.rmtree(run / "heads")
        target_model = load_target_model(str(base), dtype="float32")
        save_draft(Eagle3Draft.from_target_model(target_model), run / "heads", str(base))
    warnings = export_run(resolve_model(str(run), None, None), to).warnings
    assert any(text.startswith("answers end at") for text in warnings) == is_warned

"""Decide whether an evaluation compiles the decoding passes (`compile: auto`): where its questions repay that."""

from __future__ import annotations

from dataclasses import replace

from medusa_train.checkpoint.choose_compile import Outlook, compile_obstacle, compile_or_report, compile_seconds
from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths, names_tree_file
from medusa_train.config.schema import EvalConfig
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.questions import Bench
from medusa_train.inference.batch import TIMED_ANSWERS, plain_step_seconds
from medusa_train.inference.decoding_form import DecodingForm
from medusa_train.progress import RunProgress


def compile_if_repaid(
    cfg: EvalConfig,
    bench: Bench,
    model: LoadedModel,
    paths: ModelPaths,
    progress: RunProgress,
    earlier: bool | None = None,
) -> None:
    """Compile the decoding passes of a loaded model if that saves time on `bench`; prints the decision and the reason.

    Args:
        earlier: the decision of the interrupted evaluation that is resumed, which holds; None: there is none.
    """
    backbone = model.backbone
    if earlier is not None:
        wanted, reason = earlier, "as in the interrupted evaluation"
    elif (obstacle := compile_obstacle(backbone)) is not None:
        wanted, reason = False, obstacle
    else:
        chat = ChatEncoder(backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
        prompt = chat.prompt([Message("user", bench.questions[0].turns[0])])
        with progress.phase("timing plain steps", TIMED_ANSWERS + 1, "rounds") as phase:
            step = plain_step_seconds(backbone, prompt, cfg.batch_size, phase.advance)
        cost = compile_seconds(backbone, trees=model.proposer is not None)
        outlook = Outlook(expected_steps(cfg, bench), step, _refit_steps(cfg, model, paths), cost)
        wanted, reason = outlook.repaid, str(outlook)
    progress.print(f"compile: {'yes' if wanted else 'no'}, {reason}")
    if wanted:
        with progress.phase("compiling the decoding passes", ticking=True):
            compile_or_report(backbone, paths, progress.print, rows=cfg.batch_size, trees=model.proposer is not None)


def expected_steps(cfg: EvalConfig, bench: Bench) -> int:
    """Return the plain steps that plain decoding and the tree are expected to take the time of.

    That is one answer of full length per turn: most answers of both end earlier, and a tree needs fewer steps.
    """
    turns = sum(len(question.turns) for question in bench.questions)
    return cfg.max_new_tokens * -(-turns // cfg.batch_size)


def _refit_steps(cfg: EvalConfig, model: LoadedModel, paths: ModelPaths) -> int:
    """The plain steps that `refit_tree` takes at most: one per token that is generated for it."""
    if model.draft is None or paths.tree is None or names_tree_file(cfg.tree) or cfg.batch_size > 1:
        return 0  # trees are fitted to steps of single rows, which batches do not compile
    if (fitted := DecodingForm.load(paths.tree)) is None:
        return 0
    form = DecodingForm.of(model.backbone)
    with_compilation = bool(replace(form, compiled=True).differences(fitted))
    return cfg.calibration_tokens * (with_compilation - bool(form.differences(fitted)))

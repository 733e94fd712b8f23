"""A plan for a GPU: a widely used coding model, from its pieces to HumanEval. Started by
`benchmarks/gpu.sh --coder 0.5b`.

    python benchmarks/coder_pieces.py pack qwen2.5-coder-0.5b --out runs/gpu/pieces   # beforehand

`tiny` runs the same steps with the embedded model in a few minutes on a CPU, to check that every
step works. Answers are not scored here, because scoring runs the model's code. `medusa-eval --bench
humaneval --model RUN` scores them on another machine, in the sandbox, without generating them
again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_plan import Step

PIECES = "runs/gpu/pieces"
SHIPPED = "data/selfdistill/qwen_coder.jsonl.gz"
#: The plan's model answers the questions in this file again.
PROMPTS = SHIPPED


@dataclass(frozen=True)
class Coder:
    """What the plan does with one model.

    Attributes:
        model: the model's directory, to which the pieces are joined if there are any.
        recipes: configurations of Medusa-1 and EAGLE-3.
        prompts: number of prompts that the model answers.
        bench: benchmark of the evaluations.
        questions: number of its questions that are decoded.
        seconds: expected seconds of joining, of answering, of training each draft, and of each
            evaluation.
        datasets: training data in addition to the answers.
        pieces: directory of the pieces; None if there is nothing to join.
        keys: further keys of the training configuration.
    """

    model: str
    recipes: tuple[str, str]
    prompts: int
    bench: str
    questions: int
    seconds: tuple[int, int, int, int]
    datasets: tuple[str, ...] = ()
    pieces: str | None = PIECES
    keys: tuple[str, ...] = ()


def _qwen_coder(
    size: str,
    *,
    prompts: int,
    questions: int,
    seconds: tuple[int, int, int, int],
    datasets: tuple[str, ...] = (),
) -> Coder:
    """Return the entry of a Qwen 2.5 coder by the size in its name, such as "0.5b"."""
    config = f"qwen25_coder_{size.replace('.', '')}"
    return Coder(
        model=f"models/qwen2.5-coder-{size}-instruct",
        recipes=(f"{config}_m1", f"{config}_eagle3"),
        prompts=prompts,
        bench="humaneval",
        questions=questions,
        seconds=seconds,
        datasets=datasets,
    )


CODERS = {
    "0.5b": _qwen_coder(
        "0.5b", prompts=1000, questions=60, seconds=(60, 120, 90, 50), datasets=(SHIPPED,)
    ),
    "1.5b": _qwen_coder("1.5b", prompts=1500, questions=40, seconds=(120, 180, 120, 60)),
    "tiny": Coder(
        model="data/tiny",
        recipes=("tiny_m1", "tiny_eagle3"),
        prompts=8,
        bench="data/bench/code/question.jsonl",
        questions=2,
        seconds=(0, 40, 60, 60),
        pieces=None,
        keys=("max_steps=2", "calibration_tokens=60", "val_set_size=0.5", "warmup_steps=0"),
    ),
}


def coder_plan(name: str, work: str = "runs/gpu") -> list[Step]:
    """List the steps for one model in order. Each step writes its result when it ends."""
    coder = CODERS[name]
    joining, answering, training, evaluating = coder.seconds
    config = f"{coder.model}/config.json"
    steps = []

    # 1. join the model from its pieces
    origin = "part of the repository"
    if coder.pieces is not None:
        origin = "step coder-join"
        manifest = {f"{coder.pieces}/pieces.json": "python benchmarks/coder_pieces.py pack"}
        words = ("coder_pieces.py", "join", coder.pieces)
        steps.append(_step("join", words, joining, manifest, makes=config))

    # 2. generate the model's own answers in batches, as training data
    answers = f"{work}/coder_answers.jsonl"
    words = ("selfdistill", "--model", coder.model, "--prompts", PROMPTS, "--output", answers)
    words += ("--limit", str(coder.prompts))
    words += ("max_new_tokens=768" if name != "tiny" else "max_new_tokens=32",)
    words += ("temperature=0.3", "batch_size=64", "drop_truncated=false", "drop_looping=false")
    needs = {config: origin, PROMPTS: "part of the repository"}
    steps.append(_step("answers", words, answering, needs, makes=answers))

    # 3. train two drafts, and evaluate each of them
    paths = (answers, *coder.datasets)
    datasets = ", ".join(f"{{path: {path}, type: messages}}" for path in paths)
    for recipe in coder.recipes:
        run = f"{work}/{recipe}"
        words = ("train", f"configs/{recipe}.yaml", f"base_model={coder.model}")
        words += (f"datasets=[{datasets}]", f"output_dir={run}", "overwrite_output_dir=true")
        needs = {config: origin, answers: "step coder-answers"}
        tree = f"{run}/tree.json"
        train = _step(f"{recipe}-train", (*words, *coder.keys), training, needs, makes=tree)
        steps.append(train)
        out = f"{work}/{recipe}-eval"
        words = ("eval", "--bench", coder.bench, "--model", run, "--limit", str(coder.questions))
        words += ("--output-dir", out, "score=false", "generate=false", "prompt_lookup=false")
        words += ("--max-new-tokens", "512" if name != "tiny" else "32")
        page = (f"{out}/report.md", f"{out}/report.json")
        needs = {tree: f"step {train.name}"}
        steps.append(_step(f"{recipe}-eval", words, evaluating, needs, report=page))
    return steps


def _step(
    name: str,
    words: tuple[str, ...],
    seconds: int,
    needs: dict[str, str],
    makes: str | None = None,
    report: tuple[str, str] | None = None,
) -> Step:
    """Return a step. Its time limit is 1.5 times the expected seconds, plus 30 seconds."""
    page, figures = report or (None, None)
    limit = seconds + seconds // 2 + 30
    return Step(f"coder-{name}", 1, words, seconds, limit, needs, makes, page, figures)

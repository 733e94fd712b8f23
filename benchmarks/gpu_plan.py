"""The steps that benchmarks/gpu.sh runs on a GPU, their parts, and the files that they need."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART_SECONDS, ALL_SECONDS = 480, 1860  # time limits of one part, and of all parts together
#: The benchmarks' time limits are computed from these values, in this order: --seconds of decode.py
#: and of train.py; then estimates for starting a script, for loading a model and timing its heads,
#: for compiling it, and for one process of train.py.
TIMED_SECONDS, CASE_SECONDS, START_SECONDS, LOAD_SECONDS, COMPILE_SECONDS, PROCESS_SECONDS = (
    10,
    8,
    20,
    20,
    45,
    20,
)
# test processes that share the GPU: tests measure no times, and only their own process's memory
TEST_WORKERS = 8
SMOLLM2 = "models/smollm2-135m-instruct/config.json"
SMOLLM2_BENCH = "data/bench/smollm2/question.jsonl"
#: Packages that the steps import but that PyTorch's image with transformers lacks, and their
#: requirements.
WHEELS = (
    *("accelerate", "bitsandbytes", "deepspeed", "einops", "hjson", "msgpack", "ninja"),
    *("peft", "psutil", "py-cpuinfo"),
    *("annotated-types", "pydantic", "pydantic_core", "typing-inspection"),
    *("certifi", "httpcore", "httpx"),
    *("anyio", "distro", "h11", "jiter", "openai", "sniffio"),
    *("contourpy", "cycler", "fonttools", "kiwisolver", "matplotlib", "pillow", "pyparsing"),
    *("python-dateutil", "six"),
    *("execnet", "iniconfig", "pluggy", "pytest", "pytest-xdist"),
)
#: Packages that PyPI has only as source. Their wheels must be built, which needs torch.
BUILT = ("deepspeed",)
COMMANDS = {
    "train": "medusa_train.cli.train",
    "eval": "medusa_train.cli.evaluate",
    "selfdistill": "medusa_train.cli.selfdistill",
}


@dataclass(frozen=True)
class Step:
    """One command of the plan.

    Attributes:
        words: `pytest`, `train`, `eval`, `selfdistill` or a script of benchmarks/, and its
            arguments.
        expected: seconds that it should take on a data-center GPU.
        limit: seconds after which it is stopped.
        needs: files and directories that it reads, each with the command that makes it.
        makes: file that later steps read.
        page: Markdown file that it writes for the report.
        figures: JSON file that it writes for the report; for tests JUnit's XML.
    """

    name: str
    part: int
    words: tuple[str, ...]
    expected: int
    limit: int
    needs: Mapping[str, str] = field(default_factory=dict)
    makes: str | None = None
    page: str | None = None
    figures: str | None = None

    @property
    def command(self) -> list[str]:
        """The process to start, in the repository's root."""
        program, *arguments = self.words
        if program.endswith(".py"):
            return [sys.executable, f"benchmarks/{program}", *arguments]
        return [sys.executable, "-m", COMMANDS.get(program, program), *arguments]


def plan(work: str = "runs/gpu") -> list[Step]:
    """List the steps in order. They write to subdirectories of `work`."""

    def train(name: str, part: int, expected: int, limit: int, needs: Mapping[str, str]) -> Step:
        run = f"{work}/{name}"
        words = ("train", f"configs/{name}.yaml", f"output_dir={run}", "overwrite_output_dir=true")
        return Step(f"{name}-train", part, words, expected, limit, needs, makes=f"{run}/tree.json")

    def measure(
        name: str, part: int, bench: str, expected: int, limit: int, *, rows: int = 1
    ) -> Step:
        run, step = f"{work}/{name}", f"{name}-eval" + (f"-{rows}-rows" if rows > 1 else "")
        needs, out = {f"{run}/tree.json": f"step {name}-train"}, f"{work}/{step}"
        words = (
            "eval",
            "--bench",
            bench,
            "--model",
            run,
            "--limit",
            f"{max(12, rows)}",
            "--output-dir",
            out,
        )
        words += ("--max-new-tokens", "128", "generate=false", "exactness=false")
        words += (f"batch_size={rows}",) if rows > 1 else ("prompt_lookup=false",)
        return Step(
            step,
            part,
            words,
            expected,
            limit,
            needs,
            page=f"{out}/report.md",
            figures=f"{out}/report.json",
        )

    def tests(name: str, part: int, expected: int, limit: int) -> Step:
        figures = f"{work}/{name}.xml"
        words = (
            "pytest",
            "-v",
            "-m",
            "gpu",
            "tests/gpu",
            "-n",
            f"{TEST_WORKERS}",
            f"--junitxml={figures}",
        )
        return Step(name, part, words, expected, limit, figures=figures)

    def decode(
        name: str, part: int, shapes: Sequence[str], settings: Sequence[str], load: int
    ) -> Step:
        words = (
            "--shapes",
            *shapes,
            "--contexts",
            "1024",
            "--nodes",
            "1",
            "16",
            "63",
            "--dtypes",
            "bfloat16",
        )
        words += ("--settings", *settings, "--seconds", f"{TIMED_SECONDS}")
        expected = START_SECONDS + len(shapes) * (TIMED_SECONDS + load * len(settings))
        # a script may take three times --seconds for the calls of one shape
        limit = expected + 2 * TIMED_SECONDS * len(shapes)
        return script("decode", part, words, expected, limit, name, work)

    def training(name: str, part: int, cases: int, words: tuple[str, ...]) -> Step:
        words += ("--rounds", "1", "--seconds", f"{CASE_SECONDS}")
        expected = START_SECONDS + cases * (CASE_SECONDS + PROCESS_SECONDS)
        limit = expected + 2 * PROCESS_SECONDS
        return script("train", part, words, expected, limit, name, work)

    def batches(shape: str, part: int, expected: int, limit: int) -> Step:
        words = ("--shapes", shape, "--rows", "64", "128", "--settings", "static")
        return script("gpu_batches", part, words, expected, limit, f"batches-{shape}", work)

    data = (
        *(f"data/selfdistill/{name}.jsonl.gz" for name in ("smollm2", "smollm2_validation")),
        SMOLLM2_BENCH,
    )
    answers = f"{work}/selfdistill.jsonl"
    distilled = (
        "selfdistill",
        "--model",
        str(Path(SMOLLM2).parent),
        "--prompts",
        data[1],
        "--output",
        answers,
        "--limit",
        "512",
        "batch_size=128",
        "max_new_tokens=128",
    )
    smollm2 = {SMOLLM2: "make smollm2-model", **dict.fromkeys(data, "part of the repository")}
    return [
        tests("tests", 1, 150, 300),
        decode("decode-7b", 2, ("7B",), ("stock", "static"), LOAD_SECONDS),
        training("train-7b", 2, 2, ("--parts", "shape7b", "--sequences", "2048")),
        train("smollm2_m1", 3, 90, 150, smollm2),
        measure("smollm2_m1", 3, SMOLLM2_BENCH, 40, 70),
        measure("smollm2_m1", 3, SMOLLM2_BENCH, 30, 60, rows=8),
        measure("smollm2_m1", 3, SMOLLM2_BENCH, 30, 60, rows=32),
        Step("selfdistill", 3, distilled, 60, 110, smollm2, makes=answers),
        training(
            "train-7b-8-rows",
            4,
            3,
            ("--parts", "shape7b", "compiled7b", "--sequences", "2048", "--rows", "8"),
        ),
        decode("decode-compiled", 4, ("7B",), ("compiled",), LOAD_SECONDS + 2 * COMPILE_SECONDS),
        batches("1.5B", 5, 100, 150),
        batches("8B", 5, 140, 220),
    ]


def script(
    file: str,
    part: int,
    arguments: Sequence[str],
    expected: int,
    limit: int,
    name: str,
    work: str,
) -> Step:
    """Return a step that runs a script of benchmarks/, with its page and figures."""
    out = f"{work}/{name}"
    words = (f"{file}.py", *arguments, "--out", out)
    page, figures = f"{out}/{file}.md", f"{out}/{file}.json"
    return Step(name, part, words, expected, limit, page=page, figures=figures)


def short_plan(minutes: int, work: str = "runs/gpu") -> list[Step]:
    """List the most useful steps for 15 or 8 minutes (`--minutes`), the most useful first.

    Each step writes its result when it ends. decode.py and train.py also write after every context
    or case, so that little is lost if the machine is taken away.
    """

    def step(name: str, expected: int, limit: int, *words: str) -> Step:
        file, *arguments = words
        return script(file, 1, arguments, expected, limit, name, work)

    def decode(name: str, seconds: int, expected: int, limit: int, *words: str) -> Step:
        common = ("--nodes", "63", "--dtypes", "bfloat16", "--seconds", str(seconds))
        return step(name, expected, limit, "decode", *common, *words)

    def train(name: str, expected: int, limit: int, *words: str) -> Step:
        return step(name, expected, limit, "train", "--rounds", "1", "--seconds", "6", *words)

    static = ("--settings", "static")
    both = ("--settings", "static", "compiled")
    seven, eight = ("--shapes", "7B"), ("--shapes", "8B")
    heads = ("--heads", "full", "32768", "shared")
    if minutes <= 8:
        contexts = ("--contexts", "1024")
        profile = step("profile", 45, 70, "gpu_profile", "decode", *contexts, *static)
        return [
            profile,
            decode("steps-7b", 6, 120, 180, *seven, *contexts, *both),
            decode("loops-8b", 6, 80, 130, *eight, *contexts, *static, *heads),
        ]
    contexts = ("--contexts", "1024", "4096")
    lengths = ("--sequences", "2048")
    return [
        step("profile", 75, 110, "gpu_profile", "decode", *contexts, *static),
        decode("steps-7b", 10, 200, 250, *seven, *contexts, *both),
        decode("loops-8b", 6, 80, 120, *eight, "--contexts", "1024", *static, *heads),
        step("profile-train", 35, 60, "gpu_profile", "train", "--parts", "medusa1_7b"),
        train("train-7b", 95, 130, "--parts", "medusa1_7b", "compiled7b", "packed7b", *lengths),
        train("train-qlora", 60, 85, "--parts", "unchecked7b", *lengths),
    ]


# --- Checks: `--dry-run` ----------------------------------------------------------------------------------------------


def problems_of(step: Step, makers: Iterable[Step]) -> list[str]:
    """Check the arguments of a step, and that its files exist or that another step makes them.

    Args:
        makers: all steps of the plan.
    """
    made = {other.makes for other in makers}
    missing = [path for path in step.needs if path not in made and not (ROOT / path).exists()]
    problems = [f"{path} is missing: {step.needs[path]}" for path in missing]
    program, *arguments = step.words
    if program.endswith(".py"):
        try:
            importlib.import_module(program.removesuffix(".py")).parse_arguments(arguments)
        except SystemExit:
            problems.append(f"{program} does not accept {' '.join(arguments)}")
    elif program in COMMANDS:
        problems += command_problems(program, arguments, made | set(missing))
    else:
        problems += test_problems(step)
    return problems


def command_problems(
    program: str, arguments: Sequence[str], made: Iterable[str | None]
) -> list[str]:
    """Parse the arguments of a command, validate the configuration, and check that its files exist.

    Args:
        made: paths that need not exist yet.
    """
    import typer
    from typer.main import get_command

    from medusa_train.cli.common import read_arguments
    from medusa_train.config.schema import EvalConfig, SelfDistillConfig, TrainConfig
    from medusa_train.errors import MedusaError
    from medusa_train.evaluation.questions import load_benchmark

    module = importlib.import_module(COMMANDS[program])
    # click's UsageError, which newer versions of typer contain themselves
    (usage_error,) = typer.BadParameter.__bases__
    try:
        given = get_command(module.app).make_context(program, list(arguments)).params
        flags = {
            key: value for key, value in given.items() if value is not None and value is not False
        }
        words = flags.pop("arguments", None) or []
        flags.pop("num_gpus", None)  # an option of the command, not a key
        if program == "selfdistill":
            flags = {key: value for key, value in flags.items() if value}
            read_arguments(SelfDistillConfig, words, flags=flags)
            return []
        if program == "eval":
            load_benchmark(read_arguments(EvalConfig, words, flags=flags).bench, print)
            return []
        cfg = read_arguments(TrainConfig, words, flags=flags)
    except (usage_error, MedusaError) as error:
        return [str(error)]
    written = [path for path in made if path is not None]
    ready = {*written, *(str(Path(path).parent) for path in written)}
    paths = [cfg.base_model, *(dataset.path for dataset in cfg.datasets)]
    return [
        f"{path} is missing" for path in paths if path not in ready and not (ROOT / path).exists()
    ]


def test_problems(step: Step) -> list[str]:
    """Check that pytest can collect the tests, without running them."""
    command = [word for word in step.command if not word.startswith("--junitxml")]
    done = subprocess.run(
        [*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return [f"pytest cannot collect the tests: {''.join(last)}"]
    return []


test_problems.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def wheels() -> dict[str, str | None]:
    """Return the packages in `WHEELS` with their versions in constraints.txt; None if a package is
    not listed there.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    return {
        name: pins[name].partition(";")[0].split()[0] if name in pins else None for name in WHEELS
    }

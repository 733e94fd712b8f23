"""The README and docs/ are true: paths and links exist, commands are valid, Python blocks run."""

import ast
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa_train.cli import common
from medusa_train.cli.reference import command_page
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from tests.evaluation.tiny_model import write_run, write_target_model

DOCS = PROJECT_ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
PAGES["README.md"] = PROJECT_ROOT / "README.md"
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
MODULES = {
    "medusa-train": "train",
    "medusa-selfdistill": "selfdistill",
    "medusa-eval": "evaluate",
    "medusa-export": "export",
}
#: A short chat template that reads tools and calls.
TOOLS_TEMPLATE = (
    "{{ bos_token }}{{ '<tools>' if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FILES_START = "\n## Files\n"
#: programs in bash blocks that this project does not install
FOREIGN = {"python3", "pip", "hf", "source", "vllm", "until", "kill", "export", "bash"}


class Parsed(BaseException):
    """The command line was understood: nothing further is run."""


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command in the pages' bash blocks, without comments and line breaks; `&&` separates
    commands.
    """
    for name, text in TEXTS.items():
        variables: dict[str, str] = {}  # a page's blocks are typed one after the other
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = [
                    string.Template(word).safe_substitute(variables)
                    for word in shlex.split(line, comments=True)
                ]
                while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
                    name_of_variable, value = words.pop(0).split("=", 1)
                    variables[name_of_variable] = value
                while words:
                    end = words.index("&&") if "&&" in words else len(words)
                    yield name, words[:end]
                    words = words[end + 1 :]


COMMANDS = list(commands())


def of(*programs: str) -> list[Any]:
    return [
        pytest.param(words, id=f"{page}: {' '.join(words)}")
        for page, words in COMMANDS
        if words[0] in programs
    ]


def stripped(words: list[str]) -> list[str]:
    """A launcher's command (torchrun, srun) without the launcher."""
    if words[0] == "srun":
        return words[words.index("medusa-train") :]
    module = words[words.index("-m") + 1].removeprefix("medusa_train.cli.")
    program = {file: program for program, file in MODULES.items()}[module]
    return [program, *words[words.index("-m") + 2 :]]


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the command line and validate its configuration, in the real command, and stop there."""
    module = import_module(f"medusa_train.cli.{MODULES[words[0]]}")

    def read_arguments(*args: Any, **kwargs: Any) -> None:
        common.read_arguments(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(module, "read_arguments", read_arguments)
    if "--compare" in words:
        monkeypatch.setattr(
            module, "_compare", lambda runs, *rest: runs and (_ for _ in ()).throw(Parsed)
        )
    line = re.sub(r"--num-gpus \S+", "", shlex.join(words[1:]))
    from typer.main import get_command

    command = get_command(module.app)
    with command.make_context(words[0], shlex.split(line)) as context, pytest.raises(Parsed):
        command.invoke(context)


@pytest.mark.parametrize("words", of(*MODULES))
def test_commands_are_valid(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """README's own configuration is `mine.yaml` there."""
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXTS["README.md"], flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    monkeypatch.chdir(PROJECT_ROOT)
    parse([str(tmp_path / word) if word == "mine.yaml" else word for word in words], monkeypatch)


@pytest.mark.parametrize("words", of("torchrun", "srun"))
def test_commands_of_launchers_are_valid(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)
    parse(stripped(words), monkeypatch)


@pytest.mark.parametrize("words", of("make"))
def test_make_targets_exist(words: list[str]) -> None:
    assert re.search(
        rf"^{words[1]}:",
        (PROJECT_ROOT / "Makefile").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


def test_make_smollm2_runs_valid_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a configuration can be checked: the model and the data are large, and the run takes
    minutes.
    """
    monkeypatch.chdir(PROJECT_ROOT)
    recipe = subprocess.run(
        ["make", "--dry-run", "smollm2"], capture_output=True, text=True, check=True
    ).stdout
    commands = [
        shlex.split(line) for line in re.findall(r"bin/(medusa-(?:train|eval) [^;\n]+);", recipe)
    ]
    assert [words[0] for words in commands] == ["medusa-train", "medusa-eval", "medusa-eval"]
    for words in commands:
        parse(words, monkeypatch)


def test_every_command_is_checked() -> None:
    assert {Path(words[0]).name for _, words in COMMANDS} <= {
        *MODULES,
        *FOREIGN,
        "torchrun",
        "srun",
        "make",
        "python",
    }
    pyproject = (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"{name} = " in pyproject for name in MODULES)
    assert os.access(PROJECT_ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("name", TEXTS)
def test_named_paths_and_links_exist(name: str) -> None:
    text, page = TEXTS[name], PAGES[name]
    named = set(
        re.findall(r"\b(?:configs|data|tests|benchmarks|medusa_train)/[\w./-]+\.\w+\b", text)
    )
    if name.startswith("development/"):
        named |= set(re.findall(r"\b[a-z_]+/[a-z_/]+\.py\b", text))
    named = {path for path in named if not path.startswith(("data/bench/NAME",))}
    named -= set(re.findall(r"--output (\S+)", text))  # the commands of the page write these
    roots = (PROJECT_ROOT, PROJECT_ROOT / "medusa_train")
    assert [
        path for path in sorted(named) if not any((root / path).exists() for root in roots)
    ] == []
    links = [
        link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def file_list() -> str:
    """List the files of each package, for the architecture page."""
    package = PROJECT_ROOT / "medusa_train"
    lines = []
    for init in sorted(package.rglob("__init__.py")):
        names = [
            file.stem for file in sorted(init.parent.glob("*.py")) if file.name != "__init__.py"
        ]
        name = init.parent.relative_to(package).as_posix().removeprefix(".") or "medusa_train"
        lines += [f"- **{name}**: {', '.join(names)}"] if names else []
    return "\n".join(lines)


def test_the_architecture_page_lists_the_files() -> None:
    """After a file was added or removed, `python -m tests.test_docs` writes the list again."""
    assert TEXTS["development/architecture.md"].split(FILES_START)[1].strip() == file_list()


def test_the_calls_from_a_record_to_its_loss_are_in_the_files_listed() -> None:
    page = TEXTS["development/architecture.md"]
    calls = re.findall(r"^ *(\w+) +([a-z_]+/[a-z_]+\.py) ", page, flags=re.MULTILINE)
    assert len(calls) == 16
    for name, file in calls:
        code = (PROJECT_ROOT / "medusa_train" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in code


def test_the_architecture_page_names_every_runner() -> None:
    code = (PROJECT_ROOT / "medusa_train" / "inference" / "cuda_graphs.py").read_text(
        encoding="utf-8"
    )
    runners = set(re.findall(r"^class (\w+Runner)\b", code, flags=re.MULTILINE))
    assert set(re.findall(r"`(\w+Runner)`", TEXTS["development/architecture.md"])) == runners


def texts_of_the_code() -> list[str]:
    """Every string of the package, with {} where a formatted one has a value."""
    texts = []
    for path in (PROJECT_ROOT / "medusa_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in node.values
                ]
                texts.append("".join(parts))
    return texts


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """A quoted message stands in the code, part by part between its dots."""
    page = TEXTS["reference/messages.md"].split("## Messages")[1]
    messages = re.findall(r"^\*\*(?:`([^`]+)`|`` (.+) ``)\*\*$", page, flags=re.MULTILINE)
    assert len(messages) == len(re.findall(r"^\*\*", page, flags=re.MULTILINE))
    assert len(messages) >= 25
    messages = [single or double for single, double in messages]
    code = "\n".join(texts_of_the_code())
    parts = [part.strip() for message in messages for part in message.split("...")]
    keys = {"base_model: is missing": "is missing ("}  # the key stands before the message
    assert [part for part in parts if keys.get(part, part) not in code] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_a_heading(name: str) -> None:
    page = PAGES[name]
    lost = []
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", TEXTS[name]):
        path, anchor = link.split("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if anchor not in anchors(target.read_text(encoding="utf-8")):
            lost.append(link)
    assert lost == []


def test_the_readme_names_demo_and_tests_first() -> None:
    """With the time that each takes, on new and on old processors."""
    first = "\n".join(TEXTS["README.md"].splitlines()[:40])
    for command in ("make demo", "make test"):
        assert re.search(rf"^\| `{command}`.* \| \d+ min \d+ s \| \d+ min \d+ s \|$", first, re.M)
    assert "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2" in TEXTS["README.md"]


def test_pages_that_need_pytorchs_index_tell_where_its_address_is() -> None:
    pages = [text for text in TEXTS.values() if "PIP_EXTRA_INDEX_URL" in text]
    assert pages
    assert all("https://pytorch.org/get-started/locally/" in text for text in pages)


def test_the_site_lists_every_page() -> None:
    """A page that the navigation lacks is found by nobody."""
    navigation = yaml.safe_load((PROJECT_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"[\w./-]+\.md", str(navigation))
    assert sorted(listed) == sorted(name for name in PAGES if name != "README.md")


def test_the_page_of_the_commands_is_that_of_the_code() -> None:
    """`python -m medusa_train.cli.reference` writes it again."""
    assert TEXTS["reference/cli.md"] == command_page()


def test_what_a_loop_is_stands_on_one_page() -> None:
    """Words in training data and tokens in an evaluation read like two definitions elsewhere."""
    definition = re.compile(r"\b(?:eight|8)[- ](?:words|tokens?)\b")
    pages = {
        name
        for name, text in TEXTS.items()
        if definition.search(text) and not name.startswith("results/")
    }
    # the second is the description of the key `drop_looping`
    assert pages == {"how-to/make-training-data.md", "reference/configuration.md"}


@pytest.mark.parametrize("name", ["llama31_8b_eagle3", "llama31_8b_m1", "llama31_8b_m2"])
def test_the_data_of_a_configuration_is_made_as_in_the_readme(name: str) -> None:
    """README's recipe is for the model of these configurations."""
    text = (PROJECT_ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    for pattern in (
        r"vllm serve \S+ (.*--generation-config vllm)",
        r"medusa-selfdistill (--prompts \S+ sample=\d+)",
    ):
        in_readme, in_configuration = (
            re.search(pattern, TEXTS["README.md"]),
            re.search(pattern, text),
        )
        assert in_readme is not None
        assert in_configuration is not None
        assert in_configuration[1] == in_readme[1]


def test_an_eagle3_draft_of_a_large_model_has_one_size_of_vocabulary() -> None:
    """In the configurations, and in what pages add to them."""
    texts = list(TEXTS.values())
    for name in ("any_eagle3", "llama31_8b_eagle3", "qwen3_8b_eagle3"):
        texts.append((PROJECT_ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    sizes = re.findall(r"(?:^  vocab_size: |eagle3\.vocab_size=)(\d+)", "\n".join(texts), re.M)
    assert set(sizes) == {"32000"}


def test_a_study_names_its_model_before_its_figures() -> None:
    studies = TEXTS["explanation/results.md"].split("## Studies")[1].split("\n- ")[1:]
    models = ("SmolLM2", "coder", "test model", "tiny target model", "demo")
    nameless = []
    for study in studies:
        before, *figures = re.split(r"\d\.\d\d", study)
        if figures and not any(model in before for model in models):
            nameless.append(study)
    assert nameless == []


def test_the_configuration_of_the_readme_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXTS["README.md"], flags=re.DOTALL)
    assert TrainConfig.model_validate(yaml.safe_load(block)).draft == "eagle3"


def test_python_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target_model = write_target_model(tmp_path / "backbone")
    (target_model / "chat_template.jinja").write_text(TOOLS_TEMPLATE, encoding="utf-8")
    write_run(tmp_path / "runs" / "demo", target_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    blocks = {
        name: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        for name, text in TEXTS.items()
    }
    assert any("model.generate" in block for block in blocks["README.md"])
    for of_page in blocks.values():
        names: dict[str, Any] = {}  # a page's blocks are typed one after the other
        for block in of_page:
            exec(compile(block, "docs", "exec"), names)
    assert capsys.readouterr().out.strip()


if __name__ == "__main__":
    architecture = DOCS / "development" / "architecture.md"
    before = architecture.read_text(encoding="utf-8").split(FILES_START)[0]
    architecture.write_text(f"{before}{FILES_START}\n\n{file_list()}\n", encoding="utf-8")

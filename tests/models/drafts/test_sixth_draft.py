"""Adding a draft is one file, one section and one line: a sixth one, added to a copy of the package,
trains, resumes, decodes in exact sizes, in fixed shapes and in batches, is estimated, and is refused by exports.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import medusa_train
from tests.hub.commands import Commands

PACKAGE = Path(medusa_train.__file__).parent
ROOT = Path(__file__).parents[3]

SECTION = '''
class SixthConfig(DraftConfig):
    """Keys of `sixth`."""

    prefix = "sixth."
    title = "Sixth"

    num_heads: PositiveInt = key(3, "number of heads", HEADS, le=32)
    vocab_size: VocabSize | None = _VOCAB_SIZE

#: Section class by'''

#: Text that is inserted, by file and by the text that it comes before.
INSERTED = {
    "config/draft_sections.py": {
        "\n#: Section class by": SECTION.removesuffix("\n#: Section class by"),
        "}\n#: `SECTIONS`, and Medusa": '    "sixth": SixthConfig,\n',
    },
    "config/schema.py": {
        "    medusa_num_heads: PositiveInt = flat(": (
            '    sixth: SixthConfig | None = key(None, "settings of draft: sixth")\n'
        ),
        "    SECTIONS,\n": "    SixthConfig,\n",
    },
    "models/drafts/__init__.py": {
        "from medusa_train.models.drafts.amphista": (
            "from medusa_train.models.drafts.sixth import SixthDraft\n"
        ),
        '    "eagle3": Eagle3Draft,\n': '    "sixth": SixthDraft,\n',
    },
}

#: The tests that all drafts pass, run on the copy.
CHECKS = """
import tests.inference.test_drafts as drafts
import tests.inference.test_static_steps as steps
import tests.inference.test_conversations as conversations
from pathlib import Path
import torch
from medusa_train.trees.tree import Tree

drafts.SETTINGS["sixth"] = {"num_heads": 3}
drafts.test_every_draft_is_tested()
for family in ("llama", "mistral-window"):
    drafts.test_greedy_text_equals_plain_decoding_alone_and_in_a_batch("sixth", family, drafts.TREE)
    steps.test_steps_give_the_tokens_and_paths_of_the_loop("sixth", family)
    conversations.test_turns_have_the_tokens_and_paths_of_a_fresh_start("sixth", family)
    drafts.test_documents_of_a_packed_row_are_computed_as_alone("sixth", family)
steps.test_replayed_steps_give_the_same("sixth", "llama")
steps.test_other_trees("sixth", Tree.chain(3))
drafts.test_traced_ranks_are_those_of_decoding("sixth")
drafts.test_answers_of_a_batch_have_the_traces_of_single_rows("sixth")
drafts.test_training_states_have_the_shapes_that_losses_read("sixth")
drafts.test_saved_drafts_load_unchanged_and_without_target_model_weights("sixth", Path("saved"))
print("all checks passed")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the sixth draft; tests and data are those of the repository."""
    root = tmp_path_factory.mktemp("sixth")
    package = root / "medusa_train"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("sixth.py"), package / "models" / "drafts")
    for name, places in INSERTED.items():
        text = (package / name).read_text()
        for place, inserted in places.items():
            assert text.count(place) == 1, f"{name}: {place!r}"
            text = text.replace(place, inserted + place)
        (package / name).write_text(text)
    for name in ("tests", "data"):
        (root / name).symlink_to(ROOT / name)
    return root


@pytest.fixture
def environment(copy: Path) -> dict[str, str]:
    """Variables with which Python imports the copy."""
    return {"PYTHONPATH": str(copy), "COLUMNS": "200"}


def test_it_passes_the_tests_of_all_drafts(copy: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=copy,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


@pytest.fixture
def commands(copy: Path, environment: dict[str, str]) -> Iterator[Commands]:
    running = Commands(copy, environment)
    yield running
    running.close()


@pytest.mark.slow
def test_it_trains_resumes_is_evaluated_and_is_refused_by_exports(
    copy: Path, commands: Commands
) -> None:
    config = {
        "base_model": "data/tiny",
        "draft": "sixth",
        "sixth": {"num_heads": 2, "vocab_size": 512},
        "datasets": [{"path": "data/selfdistill/tiny.jsonl"}],
        "sequence_len": 256,
        "val_set_size": 0.02,
        "lr_scheduler": "constant",
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "calibration_tokens": 0,  # no tree is fitted
        "output_dir": "runs/whole",
    }
    (copy / "sixth.yaml").write_text(json.dumps(config))
    train = ("medusa-train", "sixth.yaml")
    _, plan = commands.run(*train, "--inspect")
    assert "2 Sixth heads" in plan
    assert "GB" in plan
    commands.run(*train)
    commands.run(*train, "output_dir=runs/parts", "max_steps=3")
    commands.run(*train, "output_dir=runs/parts", "--resume")
    heads = [copy / "runs" / name / "heads" / "draft.safetensors" for name in ("whole", "parts")]
    assert heads[0].read_bytes() == heads[1].read_bytes()
    words = ("--bench", "tiny", "--model", "runs/whole", "limit=2", "max_new_tokens=24")
    commands.run("medusa-eval", *words, "tree=fixed")
    _, refused = commands.run("medusa-export", "runs/whole", "--to", "vllm", code=1)
    assert "other programs have no layout for it" in refused
    _, refused = commands.run(*train, "export=[vllm]", "output_dir=runs/x", code=2)
    assert "sixth" in refused

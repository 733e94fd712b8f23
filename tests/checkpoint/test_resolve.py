"""Paths from what a user names, and layouts from file names."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.resolve import (
    MERGED_CARD,
    ModelPaths,
    find_heads,
    newest_run,
    resolve_model,
)
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.errors import CheckpointError, TargetModelError
from tests.checkpoint.others import (
    TARGET_MODEL,
    fake_run,
    reference_tensors,
    vllm_config,
    vllm_tensors,
    write,
)


def test_the_newest_run_is_the_one_whose_heads_were_written_last(tmp_path: Path) -> None:
    fake_run(tmp_path / "b", written=100)
    newest = fake_run(tmp_path / "a", written=300)
    fake_run(tmp_path / "c", written=200)
    (tmp_path / "unfinished" / "heads").mkdir(parents=True)
    assert newest_run(tmp_path) == newest


def test_no_model_takes_the_newest_run_below_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="make demo"):
        newest_run(tmp_path / "runs")
    fake_run(tmp_path / "runs" / "only")
    assert resolve_model(None, None, None).home.resolve() == (tmp_path / "runs" / "only").resolve()


def test_a_run_gives_target_model_heads_tree_and_template(tmp_path: Path) -> None:
    run = fake_run(
        tmp_path / "run", chat_template="chatml", chat_template_kwargs={"enable_thinking": False}
    )
    paths = resolve_model(str(run), None, None)
    assert (paths.target_model, paths.heads, paths.tree) == (
        "some/model",
        run / "heads",
        run / "tree.json",
    )
    assert (paths.home, paths.chat_template) == (run, "chatml")
    assert paths.chat_template_kwargs == {"enable_thinking": False}
    assert resolve_model(str(run), "other/model", None).target_model == "other/model"
    assert resolve_model(str(run), None, None, chat_template_kwargs={}).chat_template_kwargs == {}
    assert resolve_model(str(run / "heads"), None, None) == paths


def test_a_run_never_allows_code_and_says_so(tmp_path: Path) -> None:
    run = str(fake_run(tmp_path / "run", trust_remote_code=True))
    paths = resolve_model(run, None, None)
    assert not paths.trust_remote_code
    note = paths.remote_code_note or ""
    assert "config.yaml" in note
    assert "some/model" in note
    assert "trust_remote_code=true" in note
    allowed = resolve_model(run, None, None, trust_remote_code=True)
    assert allowed.trust_remote_code
    assert allowed.remote_code_note is None
    other = resolve_model(run, "other/model", None)
    assert not other.trust_remote_code
    assert other.remote_code_note is None
    plain = resolve_model(str(fake_run(tmp_path / "plain")), None, None)
    assert plain.remote_code_note is None


@pytest.mark.parametrize(
    ("keys", "adapter", "quantization", "form"),
    [
        ({}, False, None, "unquantised"),
        ({"load_in_4bit": True}, False, "nf4", "nf4"),
        ({"load_in_8bit": True}, False, "int8", "int8"),
        ({"load_in_4bit": True}, True, "nf4", "nf4, dequantised, adapter folded in"),
        ({}, True, None, "adapter folded in"),
    ],
)
def test_heads_are_measured_over_the_target_model_that_they_were_trained_over(
    tmp_path: Path, keys: dict[str, bool], adapter: bool, quantization: str | None, form: str
) -> None:
    run = fake_run(tmp_path / "run", **keys)
    if adapter:
        (run / "adapter").mkdir()
        (run / "adapter" / "adapter_config.json").write_text("{}")
    paths = resolve_model(str(run), None, None)
    assert (paths.quantization, paths.target_model_form) == (quantization, form)
    merged = run / "export" / "merged"
    merged.mkdir(parents=True)
    (merged / "README.md").write_text(f"# {MERGED_CARD} for some/model")
    theirs = resolve_model(str(run), str(merged), None)  # which has the adapter in it
    assert (theirs.adapter, theirs.quantization) == (None, None)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    # a target model that the run itself trained
    assert resolve_model(str(run), None, None).quantization is None


def test_heads_alone_name_their_target_model_in_config_json(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="base_model=NAME"):
        resolve_model(str(tmp_path), None, None)
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    paths = resolve_model(str(tmp_path), None, None)
    assert (paths.target_model, paths.heads, paths.tree) == ("some/model", tmp_path, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"speculators_model_type": "peagle", "draft_vocab_size": 9}, "speculators' kind peagle"),
        ({"hydra_num_heads": 4, "hydra_num_layers": 4}, "Hydra heads of their authors' code"),
        ({"architectures": ["DFlash2DraftModel"]}, "of the kind DFlash2DraftModel"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "of the kind EagleLlamaForCausalLM"),
        ({"architectures": ["MiMoMTPModel"]}, "of the kind MiMoMTPModel"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "EAGLE 1 or 2"),
    ],
)
def test_published_drafts_of_other_kinds_are_named(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=f"{words}.*not read.*EAGLE-3 and DFlash drafts are read"
    ):
        resolve_model(str(tmp_path), "some/model", None)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "medusa", "architectures": ["MedusaModel"], "num_hidden_layers": 1},
        {"medusa_num_heads": 4, "num_hidden_layers": 1},
        {"draft": "hydra", "hydra_num_heads": 4},
        {"architectures": ["Eagle2_5_VLForConditionalGeneration"]},
    ],
)
def test_other_models_are_not_taken_for_drafts_of_other_kinds(
    config: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="neither a run"):
        resolve_model(str(tmp_path), "some/model", None)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run"):
        resolve_model(str(tmp_path), None, None)
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model(str(tmp_path / "absent"), None, None)
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_model(str(fake_run(tmp_path / "run")), None, tmp_path / "no-tree.json")


def test_layouts_are_recognized_by_their_files(tmp_path: Path) -> None:
    vllm = write(tmp_path / "vllm", vllm_tensors(), vllm_config(), "model.safetensors")
    assert find_heads(vllm)[1:] == ("vllm", [vllm / "model.safetensors"])
    ours = write(tmp_path / "ours", reference_tensors(), {}, "medusa_lm_head.safetensors")
    (ours / "medusa_lm_head.pt").touch()
    assert find_heads(ours)[1:] == ("reference", [ours / "medusa_lm_head.safetensors"])
    (ours / "medusa_lm_head.safetensors").unlink()
    assert find_heads(ours).files == [ours / "medusa_lm_head.pt"]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_directory_without_heads_has_no_layout(tmp_path: Path, content: bytes) -> None:
    assert find_heads(tmp_path).layout is None
    assert find_heads(tmp_path / "absent").layout is None
    target_model = write(
        tmp_path / "model", dict(TARGET_MODEL), {"model_type": "llama"}, "model.safetensors"
    )
    assert find_heads(target_model).layout is None
    with pytest.raises(CheckpointError, match="no Medusa heads here"):
        read_heads(target_model)
    (target_model / "model.safetensors").write_bytes(content)  # damaged: not for this module to say
    assert find_heads(target_model).layout is None
    (target_model / "config.json").write_text("{")
    assert find_heads(target_model).layout is None


def test_a_target_model_path_that_does_not_exist_is_refused_where_the_target_model_is_needed(
    tmp_path: Path,
) -> None:
    missing = str(tmp_path / "moved")
    run = str(fake_run(tmp_path / "run", base_model=missing))
    with pytest.raises(TargetModelError, match=r"no such directory.*--base-model"):
        resolve_model(run, None, None)
    with pytest.raises(TargetModelError, match=r"no such directory$"):
        resolve_model(None, missing, None)
    assert resolve_model(run, None, None, needs_target_model=False).target_model == missing
    assert resolve_model(run, "other/model", None).target_model == "other/model"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import medusa_train; medusa_train.load('absent')", "model 'absent': no such directory"),
        (
            "import medusa_train; medusa_train.load(base_model='./absent')",
            "base_model ./absent: no such directory",
        ),
        (
            "from medusa_train.cli.export import app; app(['absent'], standalone_mode=False)",
            "model 'absent'",
        ),
        (
            (
                "from medusa_train.cli.evaluate import app; app(['--model=absent'],"
                " standalone_mode=False)"
            ),
            "model 'absent'",
        ),
        (
            (
                "from medusa_train.cli.selfdistill import app; app(['limitt=2'],"
                " standalone_mode=False)"
            ),
            "mean limit",
        ),
    ],
)
def test_a_wrong_path_is_refused_before_torch_is_imported(code: str, message: str) -> None:
    program = f"""
import sys
try:
    {code}
except BaseException as error:
    print(error)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert message in done.stdout + done.stderr


def test_a_draft_without_training_takes_the_place_of_the_heads_or_joins_them(
    tmp_path: Path,
) -> None:
    run = fake_run(tmp_path / "run", chat_template="chatml")

    def resolve(draft: str, model: Path | None = run) -> ModelPaths:
        base = "some/model" if model is None else None
        lookup = LookupChoice.from_keys(draft, None)
        return resolve_model(None if model is None else str(model), base, None, lookup=lookup)

    alone = resolve("prompt_lookup")
    assert (alone.heads, alone.tree, alone.chat_template, alone.has_draft) == (
        None,
        None,
        "chatml",
        True,
    )
    assert resolve("medusa+prompt_lookup").heads == run / "heads"
    assert resolve("prompt_lookup", None).home.name == "model"
    (tmp_path / "a" / "export" / "merged").mkdir(parents=True)
    merged = resolve_model(None, str(tmp_path / "a" / "export" / "merged"), None)
    assert merged.home.name == "a-export-merged"
    with pytest.raises(CheckpointError, match=r"are medusa; set draft: medusa\+prompt_lookup"):
        resolve("hydra+prompt_lookup")
    with pytest.raises(CheckpointError, match="some/model has no heads"):
        resolve("medusa+prompt_lookup", None)


def test_dynamic_trees_need_an_eagle3_draft(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    lookup = LookupChoice.from_keys("prompt_lookup", None)  # chooses its trees itself
    assert resolve_model(str(run), None, "dynamic", lookup=lookup).tree_mode == "fixed"
    with pytest.raises(CheckpointError, match="some/model has no heads"):
        resolve_model(None, "some/model", "dynamic")
    with pytest.raises(
        CheckpointError,
        match=r"tree dynamic:9x3: needs eagle3 or dflash, but .*heads is medusa; use",
    ):
        resolve_model(str(run), None, "dynamic:9x3")
    shutil.rmtree(run / "heads")
    write(run / "heads", {}, {"draft": "eagle3"}, "draft.safetensors")
    for tree in ("dynamic", "dynamic:9x3", "fixed", None):
        paths = resolve_model(str(run), None, tree)
        assert (paths.tree, paths.tree_mode) == (run / "tree.json", tree or "fixed")
    with pytest.raises(
        CheckpointError, match="'dynamic:0x3': no such file, nor fixed, none, dynamic, "
    ):
        resolve_model(str(run), None, "dynamic:0x3")


def test_a_threshold_needs_heads_that_stop_drafting(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    assert resolve_model(str(run), None, None).threshold is None
    for name, base in ((str(run), None), (None, "some/model")):
        with pytest.raises(
            CheckpointError, match=r"stops the drafting of Kangaroo, but .* has (medusa|no heads)"
        ):
            resolve_model(name, base, None, threshold=0.5)
    (run / "heads" / "draft.safetensors").touch()
    (run / "heads" / "config.json").write_text('{"draft": "kangaroo"}', encoding="utf-8")
    assert resolve_model(str(run), None, None, threshold=0.0).threshold == 0.0


ODD = [None, True, 0, -1, 1e308, "x", "", [], [1], ["a", None], {}, {"a": 1}, {"a": [1]}]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "name",
    ["architectures", "speculators_model_type", "draft", "model_type", "base_model_name_or_path"],
)
def test_odd_values_in_json_are_refused_or_not_heads(
    name: str, value: object, tmp_path: Path
) -> None:
    config = {"draft": "hydra", "base_model_name_or_path": "m", "draft_vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    index = {"weight_map": value if name == "architectures" else {"medusa_head.0": value}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in (None, "draft.safetensors"):
        if file is not None:
            (tmp_path / file).touch()
        with suppress(CheckpointError, TargetModelError):
            resolve_model(str(tmp_path), None, None)

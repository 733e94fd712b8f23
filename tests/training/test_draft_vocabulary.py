"""Runs with a reduced vocabulary, which is the text's, or a Markov bias: chosen, exported, resumed,
evaluated.
"""

import io
import json
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.export.write import export_run
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import choose_precision
from medusa_train.training.inspect_run import inspect_run
from medusa_train.training.load_data import load_data
from medusa_train.training.preflight import check_run
from medusa_train.training.target_model_recipe import TargetModelRecipe
from medusa_train.training.validation import validate
from tests.training.conftest import LORA, train

SIZE = 24


def test_heads_keep_the_most_frequent_tokens_and_only_vllm_stores_them(
    make_config, console, tmp_path
) -> None:
    cfg = make_config(medusa_vocab_size=SIZE)
    assert train(cfg, console) == 0
    data = load_data(cfg, console)
    counts = torch.zeros(300, dtype=torch.long)
    for example in data.train:
        for token in example.tokens[example.supervised].tolist():
            counts[token] += 1
    out = tmp_path / "run"
    kept = heads(out)["token_map"]
    assert len(kept) == SIZE
    assert 1 in kept.tolist()  # </s> ends every answer
    assert (
        int(counts[kept].min())
        >= int(counts[sorted(set(range(300)) - set(kept.tolist()))].max())
        > 0
    )
    share = int(counts[kept].sum()) / int(counts.sum())
    assert (
        f"draft vocabulary: 24 of 300 tokens, covering {share:.2%} of training targets"
        in console.file.getvalue()
    )

    facts = export_run(resolve_model(str(out), None, None), "vllm").facts
    assert any("the other rows are filled in" in fact for fact in facts)
    config = json.loads((out / "export" / "vllm" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["medusa_vocab_size"]) == (300, SIZE)
    for to in ("reference", "reference-v2", "tgi", "trtllm"):
        with pytest.raises(CheckpointError, match=r"24 tokens .* --to vllm"):
            export_run(resolve_model(str(out), None, None), to)


def test_no_other_layout_stores_a_markov_bias(make_config, console, tmp_path) -> None:
    assert train(make_config(medusa_markov_rank=4), console) == 0
    out = tmp_path / "run"
    assert "with a Markov bias of rank 4" in console.file.getvalue()
    assert float(heads(out)["markov.output.weight"].abs().max()) > 1e-3  # 0 before training
    for to in ("reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers"):
        with pytest.raises(
            CheckpointError,
            match=rf"medusa_markov_rank: 4\), which the layout of {to} cannot store",
        ):
            export_run(resolve_model(str(out), None, None), to)
    assert not (out / "export").exists()


def heads(run) -> dict[str, torch.Tensor]:
    return load_file(run / "heads" / "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    ("options", "default", "kept"),
    [
        ({"medusa_vocab_size": SIZE}, None, ["token_map"]),
        ({"medusa_markov_rank": 4}, 0, ["markov.embedding.weight", "markov.output.weight"]),
    ],
    ids=["vocabulary", "markov"],
)
def test_stage_two_goes_on_with_the_heads_of_stage_one(
    make_config, console, tmp_path, options, default, kept
) -> None:
    train(make_config(**options, output_dir=str(tmp_path / "one")), console)
    start = {**LORA, "lora_model_dir": str(tmp_path / "one"), "output_dir": str(tmp_path / "two")}
    ((key, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{key}: {value}, the configuration {key}: {default}"):
        train(make_config(**start), console)
    train(make_config(**{**start, **options, "max_steps": 1, "learning_rate": 1e-6}), console)
    first, second = heads(tmp_path / "one"), heads(tmp_path / "two")
    for name in kept:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-4)


@pytest.fixture
def new_words(tmp_path):
    """Forty chats whose words are not those of the other data."""
    path = tmp_path / "new.jsonl"
    lines = []
    for number in range(40):
        answer = f"QUITE {number} OTHER WORDS, (BY FAR)!"
        turns = [{"from": "human", "value": f"one {number}"}, {"from": "gpt", "value": answer}]
        lines.append(json.dumps({"conversations": turns}) + "\n")
    path.write_text("".join(lines))
    return [{"path": str(path), "type": "sharegpt"}]


CONTINUED = {
    "medusa": {"medusa_vocab_size": SIZE},
    "hydra": {"draft": "hydra", "hydra": {"num_heads": 2, "vocab_size": SIZE}},
    "amphista": {"draft": "amphista", "amphista": {"num_heads": 2, "vocab_size": SIZE}},
}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_vocabulary_of_other_data_is_described_by_a_run_and_before_it(
    make_config, console, tmp_path, new_words, kind
) -> None:
    keys = {**CONTINUED[kind], "max_steps": 1}
    train(make_config(**keys, output_dir=str(tmp_path / "one")), console)
    again = make_config(**keys, datasets=new_words, lora_model_dir=str(tmp_path / "one"))

    data = load_data(again, console)
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "draft.safetensors"
    kept = load_file(tmp_path / "one" / "heads" / file)["token_map"]
    shares = []
    for part in (data.train, data.validation):
        targets = torch.cat([example.tokens[example.supervised] for example in part])
        shares.append(float(torch.isin(targets, kept).double().mean()))
    assert max(shares) < 0.9
    trained, held_out = (f"{share:.2%}" for share in shares)
    covered = (
        f"{SIZE} of 300 tokens, covering {trained} of training targets and {held_out} of"
        " validation targets\n"
    )
    warning = (
        f"warning: the draft vocabulary covers only {trained} of training targets and"
        f" {held_out} of validation targets: the heads cannot draft the other tokens."
    )

    inspected = Console(file=io.StringIO(), width=400)
    inspect_run(again, console, inspected)
    table = re.sub(" +", " ", inspected.file.getvalue())
    assert f"vocabulary {covered.strip()} \n" in table
    assert warning in table
    run = Console(file=io.StringIO(), width=400)
    train(again, run)
    assert f"draft vocabulary: {covered}" in run.file.getvalue()
    assert f"{warning} New heads, without lora_model_dir" in run.file.getvalue()


def test_heads_of_the_same_data_are_described_without_a_warning(
    make_config, console, tmp_path
) -> None:
    keys = {"medusa_vocab_size": 200, "max_steps": 1}
    train(make_config(**keys, output_dir=str(tmp_path / "one")), console)
    again = Console(file=io.StringIO(), width=400)
    train(make_config(**keys, lora_model_dir=str(tmp_path / "one")), again)
    assert "draft vocabulary: 200 of 300 tokens, covering 100.00%" in again.file.getvalue()
    assert "warning: the draft vocabulary" not in again.file.getvalue()


def test_a_vocabulary_that_lacks_the_test_data_s_tokens_is_warned_of(
    make_config, console, new_words
) -> None:
    keys = {"medusa_vocab_size": 60, "max_steps": 1, "val_set_size": 0.0}
    train(make_config(**keys, test_datasets=new_words), console)
    printed = console.file.getvalue().replace("\n", " ")
    assert re.search(r"warning: the draft vocabulary covers only [\d.]+% of validation", printed)


def test_a_new_vocabulary_of_few_tokens_is_warned_of_with_its_key(make_config, console) -> None:
    keys = {"draft": "hydra", "hydra": {"num_heads": 2, "vocab_size": 16}, "max_steps": 1}
    train(make_config(**keys), console)
    assert "Set a larger hydra.vocab_size" in console.file.getvalue()


@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_vocabulary_that_is_not_reduced_is_refused_at_once(make_config, kind, size) -> None:
    key = (
        {"medusa_vocab_size": size}
        if kind == "medusa"
        else {"draft": kind, kind: {"vocab_size": size}}
    )
    with pytest.raises(
        ConfigError, match=rf"^{kind}[._]vocab_size: [\d,]+ must be less than the 300 tokens"
    ):
        check_run(make_config(**key), 1)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_a_missing_token_is_a_miss_on_held_out_text(make_config, target_model_dir, kind) -> None:
    data = load_data(make_config(), Console(file=io.StringIO()))
    target_model = load_target_model(str(target_model_dir))
    recipe = TargetModelRecipe(target_model, choose_precision(False, torch.device("cpu")))
    kept = torch.arange(1, 280, 7)
    draft = (
        DRAFTS[kind]
        .from_target_model(target_model, num_heads=2, vocab_size=len(kept), token_map=kept)
        .eval()
    )
    batch = data.validation.batch([[i] for i in range(len(data.validation))])
    found = validate(recipe, draft, [batch], Objective(draft, 0.8))
    assert found is not None
    hidden_states = target_model.run(
        batch.tokens, positions=batch.positions, segments=batch.segments
    )
    for k, states in enumerate(draft.head_states(hidden_states, batch), start=1):
        target = shift_labels(batch.labels, k, batch.segments)
        valid = target != IGNORE_INDEX
        tokens, logits = target[valid], draft.lm_head(k).logits(states[valid])
        known = torch.isin(tokens, kept)
        assert (found.targets[k - 1], found.in_vocab[k - 1]) == (len(tokens), int(known.sum()))
        guesses = kept[logits.topk(10).indices]  # [N, 10]
        hits = (guesses == tokens[:, None]).cumsum(1).double().mean(0)  # among the best 1, 2, ...
        assert hits[-1] > 0
        assert found.top[k - 1] == pytest.approx(hits.tolist())
        loss = torch.nn.functional.cross_entropy(
            logits[known], torch.searchsorted(kept, tokens[known])
        ).detach()
        assert found.head_loss[k - 1] == pytest.approx(float(loss), rel=1e-5)
    assert 0 < found.in_vocab[0] < found.targets[0]
    assert found.record()["targets_in_vocabulary"] == found.in_vocab

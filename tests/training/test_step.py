"""What a step adds up to, and that every process's graph holds every parameter whatever its batch is."""

import torch

from medusa_train.data.batch import Batch
from medusa_train.data.targets import IGNORE
from medusa_train.losses.objective import LMSums, Objective
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.training.precision import choose_precision
from medusa_train.training.step import MicroStep, StepSums
from medusa_train.training.student import make_student


def micro(loss, correct, counts, lm=None):
    counts = torch.tensor(counts)
    return MicroStep(["a"], torch.tensor(loss), torch.tensor(correct), counts, counts - 1, 7, lm)


def test_rows_add_up_to_the_step():
    ce, kl, count = torch.tensor(3.0), torch.tensor(0.5), torch.tensor(4)
    rows = [micro(0.25, [1, 0], [3, 2]).row(), micro(0.5, [2, 2], [4, 3], LMSums(ce, ce, kl, count, count)).row()]
    sums = StepSums.of(torch.stack(rows).sum(dim=0))
    assert sums == StepSums(0.75, 14, 3.0, 0.5, 4, [3, 2], [7, 5], [5, 3])


def test_counts_beyond_float32_stay_whole():
    row = micro(1.0, [2**40 + 1], [2**41 + 1]).row()
    assert StepSums.of(row).counts == [2**41 + 1]


def test_a_batch_without_targets_reaches_every_parameter(make_config, backbone_dir):
    """ZeRO waits for the gradient of each parameter from each process: none may be missing where nothing counts."""
    cfg = make_config(recipe="medusa2", adapter="lora", lora_target_linear=True, medusa_self_distillation=True)
    backbone = Backbone.load(str(backbone_dir))
    draft = MedusaDraft.from_backbone(backbone, 3, dtype=torch.float32)
    student = make_student(cfg, backbone, choose_precision(False, torch.device("cpu")))
    objective = Objective(draft, 0.8, lm="kl", heads_coefficient=0.5)
    shape = (2, 6)
    batch = Batch(
        torch.randint(0, 300, shape),
        torch.full(shape, IGNORE),
        torch.arange(6).expand(shape),
        torch.zeros(shape, dtype=torch.long),
        [],
    )
    feats = student.features(batch)
    teacher = student.teacher(batch, feats)
    out = objective.loss(
        feats,
        batch,
        torch.tensor([5, 5, 5, 5]),  # of other processes
        student_unembedding=student.unembedding(),
        teacher=teacher[0],
        teacher_unembedding=teacher[1],
    )
    assert float(out.loss.detach()) == 0.0
    out.loss.backward()
    for name, parameter in [*draft.named_parameters(), *student.parameters.items()]:
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0.0, name

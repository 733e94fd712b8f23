"""Which answer, table and short answer belong to which result page?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from result_tables import (
    coder,
    drafts,
    gpu,
    lookup,
    papers,
    served,
    training,
)


class ResultPage(NamedTuple):
    """What is written into a result page, and its line in docs/explanation/results.md."""

    answer: Callable[[], str]
    table: Callable[[], str]
    short: Callable[[], str]


#: By name, in the order of docs/explanation/results.md.
RESULT_PAGES = {
    "qwen_coder": ResultPage(coder.coder_answer, coder.coder_table, coder.coder_short),
    "compiled_smollm2": ResultPage(
        lookup.compiled_answer, lookup.compiled_table, lookup.compiled_short
    ),
    "drafts_smollm2": ResultPage(
        drafts.drafts_smollm2_answer, drafts.drafts_smollm2_table, drafts.drafts_smollm2_short
    ),
    "eagle3_smollm2": ResultPage(drafts.eagle3_answer, drafts.eagle3_table, drafts.eagle3_short),
    "served": ResultPage(served.served_answer, served.served_table, served.served_short),
    "gpu": ResultPage(gpu.gpu_answer, gpu.gpu_table, gpu.gpu_short),
    "medusa2_smollm2": ResultPage(
        training.medusa2_answer, training.medusa2_table, training.medusa2_short
    ),
    "papers_smollm2": ResultPage(papers.papers_answer, papers.papers_table, papers.papers_short),
    "papers_speed_smollm2": ResultPage(
        papers.papers_speed_answer, papers.papers_speed_table, papers.papers_speed_short
    ),
}

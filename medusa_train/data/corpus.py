"""The configured sources as tokens, and what became of their records; knows no split, order or batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.examples import Example, Outcome, fit
from medusa_train.data.formats import bad_records
from medusa_train.data.sources import Source, open_source
from medusa_train.errors import DataError


@dataclass
class DataReport:
    """What became of the records, for people. `notes` are sentences on anything else that is worth knowing."""

    sequence_len: int
    skipped: list[str] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"whole": 0, "cut": 0, "too_long": 0, "unsupervised": 0}
    )
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return one sentence for each thing that was not taken as it stood, and the notes."""
        cut, too_long, unsupervised = (self.outcomes[name] for name in ("cut", "too_long", "unsupervised"))
        said = [
            (len(self.skipped), f"bad records left out, the first: {self.skipped[0] if self.skipped else ''}"),
            (cut, f"cut at the end of a turn to fit sequence_len {self.sequence_len}"),
            (too_long, f"left out: their first answer ends beyond sequence_len {self.sequence_len}"),
            (unsupervised, "left out: no answer in them to learn from"),
        ]
        return [f"{count} {what}" for count, what in said if count] + self.notes


@dataclass
class Corpus:
    """All examples in the order of the sources; `origins` holds the number of each one's source."""

    examples: list[Example]
    origins: list[int]
    report: DataReport


@dataclass(frozen=True)
class Reading:
    """One entry of `datasets`, found and ready to be read: with the encoder for its chats."""

    config: DatasetConfig
    source: Source
    encoder: ChatEncoder


def open_sources(cfg: TrainConfig, encoder: ChatEncoder) -> list[Reading]:
    """Find every source; nothing is read yet.

    Whose words are learnt follows the configuration (`roles_to_train`, `train_on_inputs`); the template is the
    data set's `conversation`, else the encoder's.

    Raises:
        DataError: a source is not there.
        ConfigError: no chat template of that name.
    """
    return [
        Reading(
            entry,
            open_source(entry),
            encoder.variant(template=entry.conversation, roles=cfg.roles_to_train, everything=cfg.train_on_inputs),
        )
        for entry in cfg.datasets
    ]


def encode_sources(cfg: TrainConfig, readings: Sequence[Reading]) -> Corpus:
    """Read and encode every source; see `fit` for long conversations.

    Raises:
        DataError: a source cannot be read, or holds records that cannot be used (unless `skip_bad_records`).
    """
    corpus = Corpus([], [], DataReport(cfg.sequence_len))
    for number, reading in enumerate(readings):
        read = reading.source.read(reading.config.type, skip_bad=cfg.skip_bad_records)
        corpus.report.skipped += read.skipped
        problems: list[str] = []
        for conversation in read.conversations:
            try:
                example, outcome = fit(conversation, reading.encoder, cfg.sequence_len)
            except DataError as error:
                problems.append(str(error))
                continue
            corpus.report.outcomes[outcome] += 1
            if example is not None:
                corpus.examples.append(example)
                corpus.origins.append(number)
        if problems and not cfg.skip_bad_records:
            raise DataError(bad_records(problems, reading.config.path))
        corpus.report.skipped += problems
    return corpus

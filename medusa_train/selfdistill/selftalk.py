"""Self-talk: the model is given the first prompt and writes both roles from there on.

For models that were trained on the user's words too. Knows no engine's inside, no template and no file.
"""

from __future__ import annotations

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.seeds import Seed
from medusa_train.selfdistill.talks import DropReason, Rules, Steps, Talk, turn_seed


def selftalk(seed: Seed, *, random_seed: int, rules: Rules, rounds: int) -> Steps:
    """Answer the first turn of `seed`, then ask on in the user's name (SPEC 2, self-talk).

    It ends after `rounds` answers, with an answer that `rules` drop, with a user's turn that is blank or cut off
    by a limit, or with a turn that its speaker has said before. A question that is left without an answer is
    removed.
    """
    talk = Talk(seed)
    asked = Message("user", seed.turns[0])
    while True:
        answer = yield Request((*talk.messages, asked), turn_seed(random_seed, seed.id, talk.turns))
        why = rules.why_dropped(answer) or _repeats(talk, "assistant", answer.text)
        if why is not None:
            talk.drop(why, 1)
            return talk
        talk.add(asked, answer)
        if talk.turns == rounds:
            return talk
        name = f"user {talk.turns}"
        said = yield Request(tuple(talk.messages), turn_seed(random_seed, seed.id, name), speaker="user")
        if said.reason != "stop" or not said.text.strip() or _repeats(talk, "user", said.text):
            return talk  # nothing that was asked for is lost: the model has no more to say
        asked = Message("user", said.text)


def _repeats(talk: Talk, role: str, text: str) -> DropReason | None:
    """Whether `role` has said so before, white space and case apart."""
    earlier = {_plain(message.content) for message in talk.messages if message.role == role}
    return "repeated" if _plain(text) in earlier else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()

"""Replay: the user's turns are fed one after the other, the model's own answers being the history.

Knows no engine's inside, no file and no progress.
"""

from __future__ import annotations

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.seeds import Seed
from medusa_train.selfdistill.talks import Rules, Steps, Talk, turn_seed


def replay(seed: Seed, *, random_seed: int, rules: Rules) -> Steps:
    """Answer the turns of `seed` (SPEC 2, replay; the reference's defaults).

    An answer that `rules` drop ends the conversation: it goes with all later turns, and earlier turns stay.
    """
    talk = Talk(seed)
    for number, text in enumerate(seed.turns):
        asked = Message("user", text)
        answer = yield Request((*talk.messages, asked), turn_seed(random_seed, seed.id, number))
        why = rules.why_dropped(answer)
        if why is not None:
            talk.drop(why, len(seed.turns) - number)
            break
        talk.add(asked, answer)
    return talk

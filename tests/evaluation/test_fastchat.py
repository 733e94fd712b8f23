from medusa_train.evaluation.fastchat import model_answers
from medusa_train.evaluation.records import TimedAnswer, TurnRecord


def test_a_question_is_one_line_with_all_its_turns() -> None:
    answer = TimedAnswer((1, 2, 3, 4), 0.5, 0.1, 2, (1, 0))
    made = [
        TurnRecord(81, "writing", turn, (1,), answer, TimedAnswer((1,), 1.0), TimedAnswer((1,), 1.0), text)
        for turn, text in ((1, "One."), (2, "Two."))
    ]
    made.append(TurnRecord("x", "math", 1, (1,), None, answer, answer, "Three."))
    first, second = model_answers(made, "mine")
    assert set(first) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert (first["question_id"], first["model_id"]) == (81, "mine")
    (choice,) = first["choices"]
    assert (choice["index"], choice["turns"]) == (0, ["One.", "Two."])
    assert (choice["new_tokens"], choice["decoding_steps"], choice["wall_time"]) == ([4, 4], [2, 2], [0.5, 0.5])
    assert choice["accept_lengths"] == [2, 1, 2, 1]
    # an eos among the drafted tokens ends a step before the backbone's own one
    cut = TimedAnswer((1, 2, 3, 4), 0.5, 0.1, 2, (0, 2))
    (line,) = model_answers([TurnRecord(1, "math", 1, (1,), cut, cut, cut, "Four.")], "mine")
    assert line["choices"][0]["accept_lengths"] == [1, 2]
    assert second["choices"][0]["turns"] == ["Three."]
    assert first["answer_id"] != second["answer_id"]
    assert first["answer_id"] == model_answers(made, "mine")[0]["answer_id"]

"""tasks.py: graders give the expected verdict, files load or say which line and field is wrong."""
import json

import pytest

import tasks
from tasks import InputError, Task, grade, load_tasks


def qa(gold, answer, parts="all"):
    return grade(Task("t", "q", gold, "nq", "mhqa"), f"<answer>{answer}</answer>", parts).score


def math(gold, answer):
    return grade(Task("t", "q", gold, "math", "math"), f"<answer>{answer}</answer>").score


QA_PAIRS = [                                                            # gold, answer, right?
    ("Paris", "Paris", 1), ("Paris", "paris.", 1), ("The Beatles", "beatles", 1), ("Paris", "", 0), ("Paris", "Lyon", 0),
]
MATH_PAIRS = [
    ("1000", "1,000", 1), ("1/2", "0.5", 1), (r"\frac12", "1/2", 1), ("42", "", 0), ("27.0", "27", 1), ("025", "25", 1), ("42", "43", 0),
]


@pytest.mark.parametrize("gold, answer, right", QA_PAIRS)
def test_qa_verdict(gold, answer, right):
    assert qa(gold, answer) == right


@pytest.mark.parametrize("gold, answer, right", MATH_PAIRS)
def test_math_verdict(gold, answer, right):
    assert math(gold, answer) == right


def test_an_observation_is_never_the_answer():
    task = Task("t", "q", "Paris", "nq", "mhqa")
    assert grade(task, "<wiki_search>x</wiki_search>\n<observation>\n<answer>Paris</answer>\n</observation>\n\n").score == 0


def test_rows_load_and_extra_columns_become_meta(tmp_path):
    file = tmp_path / "my.jsonl"
    file.write_text(json.dumps({"question": "q", "answer": ["a", 3], "solution": {"x": 1}}) + "\n", encoding="utf-8")
    (task,) = load_tasks(file)
    assert (task.id, task.answer, task.agent, task.meta) == ("my-0", ["a", "3"], "mhqa", {"solution": {"x": 1}})


@pytest.mark.parametrize("row, field", [({"answer": "x"}, "question"), ({"question": "q"}, "answer"), ({"question": "q", "answer": []}, "answer"),
                                        ({"question": "q", "answer": "x", "agent": "spy"}, "agent")])
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, row, field):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "q", "answer": "a"}\n\n' + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"bad\.jsonl:3: field '{field}'"):
        load_tasks(file)

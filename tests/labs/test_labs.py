"""Checks of answers: three statuses whatever the learner's code does; and the learner's copies."""

import importlib
import multiprocessing
import os
import sys
import textwrap
import threading

import cloudpickle
import pytest

from utils.labs import Status, check, checking, correct, not_yet
from utils.labs.__main__ import main as copy_main
from utils.labs.stubs import untouched
from utils.labs.verdict import Report
from utils.lessons import announce, folders

LAB = '''
import os
from utils.labs import correct, not_yet
from utils.labs import check as imported_not_a_check
from utils.labs.cases import takes
from utils.labs.kinds import anything, function, keys


def double(function):
    """Doubles a number."""
    found = function(21)
    if found == 42:
        return correct("as it should be", score="1 call")
    return not_yet(expected=42, got=found, nudge="Twice, not half.")


def broken(answer):
    """Has a fault of its own, in a helper; it calls functions before, and does not mind values."""
    if callable(answer):
        answer(21)
    return _helper_with_a_fault({})


def _helper_with_a_fault(expected):
    return correct() if expected["missing"] else not_yet()


@takes(keys({"found": anything()}))
def in_keys(answer):
    return correct() if answer["found"] == 42 else not_yet()


@takes(function())
def called(answer):
    return correct() if answer(21).bit_length() == 6 else not_yet()


def no_check():
    """Takes no answer."""


def process_id(answer):
    return not_yet(got=f"pid {os.getpid()}")


def _helper(answer):
    return correct()
'''


@pytest.fixture(scope="module", autouse=True)
def lab_97(tmp_path_factory):
    """A lab of the tests' own beside the course's."""
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "checks.py").write_text(LAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "folders", lambda: {**folders(), "97": folder})
        announce("97", folder)
        module = importlib.import_module("utils.lessons.lesson_97.checks")
        cloudpickle.register_pickle_by_value(module)  # the child does not know the folder
        yield
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["utils.lessons.lesson_97"], sys.modules["utils.lessons.lesson_97.checks"]


def test_right_and_wrong_answers():
    right = check("97.double", lambda x: 2 * x)
    assert right.status is Status.CORRECT and right.is_correct
    assert str(right) == "97.double: correct: as it should be\n  score       1 call"
    wrong = check("97.double", lambda x: x / 2)
    assert wrong.status is Status.NOT_YET and not wrong.is_correct
    for part in ("expected    42", "got         10.5", "Twice, not half."):
        assert part in str(wrong)


def test_learner_code_runs_elsewhere_and_plain_values_here():
    here = f"pid {os.getpid()}"
    assert check("97.process_id", 7).verdict.got == here
    for answer in (lambda: 7, [lambda: 7], {"f": lambda: 7}):
        assert check("97.process_id", answer).verdict.got != here


def test_an_exception_names_the_learners_own_line():
    def answer(x):
        values = {}
        return values[x]

    report = check("97.double", answer)
    assert report.status is Status.NOT_YET
    assert "your code raised KeyError: 21" in str(report)
    assert "in answer: return values[x]" in str(report)


class NeedsTwo:
    def __init__(self, a, b):
        self.a, self.b = a, b


@pytest.mark.parametrize("answer", [lambda: 2, lambda x, y: x, NeedsTwo, len, [].append])
def test_what_cannot_be_called_like_this_is_a_sentence(answer):
    report = check("97.double", answer)
    assert report.status is Status.NOT_YET
    assert "could not be used" in str(report) or "got         None" in str(report)


@pytest.mark.parametrize("answer", [7, "text", lambda x: 2 * x, lambda x: None])
def test_a_fault_of_the_check_is_not_the_learners(answer):
    report = check("97.broken", answer)
    assert report.status is Status.CHECK_FAILED and not report.is_correct
    text = str(report)
    assert text.startswith("97.broken: the check itself failed: KeyError: 'missing'.")
    assert "please report it" in text
    assert (
        'expected["missing"]' in text and "_helper_with_a_fault" in text and "run_check" not in text
    )
    assert "_helper_with_a_fault" in report._repr_html_()


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("called", 42, "Give its name, without calling it."),
        ("called", 42, "a function is wanted"),
        ("in_keys", 42, "a dict with the keys that the lab shows ('found') is wanted"),
        ("in_keys", {}, "There is no 'found' in it"),
        ("in_keys", {"Found": 42}, "no 'found'"),
        ("in_keys", lambda: 42, "a dict with the keys"),
    ],
)
def test_an_answer_of_another_kind_is_the_learners(name, answer, words):
    report = check(f"97.{name}", answer)
    assert report.status is Status.NOT_YET and words in str(report)
    assert check("97.called", lambda x: 2 * x).is_correct
    assert check("97.in_keys", {"found": 42}).is_correct


def test_a_fault_of_the_learners_function_stays_theirs_in_a_broken_check():
    def answer(x):
        raise KeyError("mine")

    report = check("97.broken", answer)
    assert report.status is Status.NOT_YET and "your code raised KeyError: 'mine'" in str(report)


def test_a_function_without_a_return_is_the_learners():
    def answer(x):
        2 * x

    assert "not yet" in (text := str(check("97.called", answer))) and "Is there a `return`?" in text


def test_no_process_to_run_an_answer_in_is_not_the_learners_fault(monkeypatch):
    def no_such_context(method):
        raise ValueError(f"cannot find context for {method!r}")

    monkeypatch.setattr(multiprocessing, "get_context", no_such_context)
    report = check("97.double", lambda x: 2 * x)
    assert report.status is Status.CHECK_FAILED and "WSL2" in str(report)


def test_loops_crashes_and_exits_end_in_a_report():
    def loop(x):
        print("still here")
        while True:
            pass

    report = check("97.double", loop, timeout_seconds=0.5)
    assert report.status is Status.NOT_YET and "0.5 s" in str(report)
    assert "still here" in str(report) and "still here" in report._repr_html_()
    assert "SIGABRT" in str(check("97.double", lambda x: os.abort()))
    assert "SystemExit" in str(check("97.double", sys.exit))


def test_an_answer_that_cannot_travel_is_a_sentence():
    lock = threading.Lock()
    report = check("97.double", lambda x: lock)
    assert report.status is Status.NOT_YET and "inside the function" in str(report)


def stub(x): ...


def stub_with_docstring(x):
    """Twice a number."""
    ...
    # your code here


def stub_in_a_frame(values):
    total = 0
    for _ in values:
        ...  # your code here
    return total


def stub_of_a_name(x):
    doubled = ...
    return doubled


def index_with_an_ellipsis(x):
    return x[..., 0]


@pytest.mark.parametrize(
    "answer",
    [
        ...,
        stub,
        stub_with_docstring,
        stub_in_a_frame,
        stub_of_a_name,
        [1, ...],
        {"a": stub},
        {"first": 1, "second": ...},
    ],
)
def test_stubs_are_not_attempted(answer):
    report = check("97.double", answer)
    assert report.status is Status.NOT_ATTEMPTED and not report.is_correct


def test_what_is_left_to_do_is_named():
    assert "second" in untouched({"first": 1, "second": ...})
    assert untouched(stub_in_a_frame) == "line 4 of `stub_in_a_frame` is still `...`"


@pytest.mark.parametrize(
    "answer", [None, 0, "...", [], {}, index_with_an_ellipsis, lambda x: x, len, print, dict]
)
def test_anything_else_is_an_attempt(answer):
    assert untouched(answer) == ""


def test_an_answer_that_holds_itself():
    circle = [1]
    circle.append(circle)
    assert untouched(circle) == "" and untouched({"a": circle}) == ""
    assert check("97.called", circle).status is Status.NOT_YET


def test_tensors_are_not_compared():
    import torch

    assert untouched(torch.zeros(3)) == "" and untouched(torch.nn.ReLU()) == ""


def test_stubs_without_source_are_found_by_their_code():
    namespace = {"__name__": "__main__"}
    exec(
        "def a(x): ...\ndef b(x):\n  'doc'\n  ...\ndef c(x): return 2 * x\nd = lambda: 4", namespace
    )
    assert [bool(untouched(namespace[name])) for name in "abcd"] == [True, True, False, False]


def test_stubs_in_a_learners_class():
    namespace = {"__name__": "__main__"}
    exec("class Ledger:\n  def add(self, x): ...\n  def __call__(self, x): return x", namespace)
    assert untouched(namespace["Ledger"]) and untouched(namespace["Ledger"]())


def test_names_that_do_not_exist_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 97.double"):
        check("97.duoble", 1)
    with pytest.raises(ValueError, match="It has 97.broken, 97.called, 97.double, 97.in_keys"):
        check("97.zzz", 1)
    with pytest.raises(ValueError, match="no lab.*97"):
        check("98.double", 1)
    for hidden in ("97._helper", "97.no_check", "97.correct", "97.imported_not_a_check"):
        with pytest.raises(ValueError, match="no exercise"):
            check(hidden, 1)


def test_html_escapes_what_learners_write():
    report = Report("97.x", not_yet("<b>", expected="a<b", got="a>b"), output="<script>")
    assert "<script>" not in report._repr_html_() and "a&lt;b" in report._repr_html_()
    assert "&lt;b&gt;" in report._repr_html_()
    assert Status.CORRECT.value in Report("97.x", correct())._repr_html_()


def test_copies_are_made_once_and_kept(tmp_path, capsys):
    lab = tmp_path / "labs/beginner/01_x.ipynb"
    lab.parent.mkdir(parents=True)
    lab.write_text("first")
    assert copy_main(tmp_path) == 0
    assert capsys.readouterr().out == "copied  my_labs/beginner/01_x.ipynb\n"
    mine = tmp_path / "my_labs/beginner/01_x.ipynb"
    mine.write_text("my answer")
    lab.write_text("second")
    assert copy_main(tmp_path) == 0
    assert capsys.readouterr().out.startswith("kept    my_labs/beginner/01_x.ipynb")
    assert mine.read_text() == "my answer"
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]


def test_copies_that_cannot_be_made_are_a_sentence(tmp_path, capsys):
    assert copy_main(tmp_path) == 1
    assert "make notebooks" in capsys.readouterr().out
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs/01_x.ipynb").write_text("lab")
    (tmp_path / "my_labs").write_text("a file where the folder should be")
    assert copy_main(tmp_path) == 1
    assert "cannot be written to" in capsys.readouterr().out


def test_the_checks_of_the_course_have_descriptions():
    from utils.labs.checking import checks_of, lab_numbers

    for number in lab_numbers():
        for name, function in checks_of(number).items():
            if number != "97":
                assert textwrap.dedent(function.__doc__ or ""), f"{number}.{name} has no docstring"

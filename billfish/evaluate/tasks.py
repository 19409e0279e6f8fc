"""The tasks of an evaluation: zero-shot questions, run by lm-eval, and texts for perplexity.

Zero-shot tasks are defined here over local JSON-lines files and agree with lm-eval's published ones
(no chat template). Rows are read and checked here and handed to lm-eval in memory, so that it uses
neither network nor cache. lm-eval is imported only when it is run.
"""

import contextlib
import importlib.resources
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from billfish.errors import UserError
from billfish.evaluate.estimate import mean
from billfish.evaluate.perplexity import wikitext_text

Row = dict[str, Any]


@dataclass(frozen=True)
class TextTask:
    """Perplexity of a text."""

    title: str
    file: str | None  # None: the sample that the package ships


@dataclass(frozen=True)
class ZeroShotTask:
    """Questions: is the right option the likeliest (without options: the greedy text)?"""

    title: str
    file: str
    row: str  # an example, shown when a file is missing or a row is wrong
    fields: Mapping[str, type]
    metric: str  # the headline: acc, or acc_norm (log-likelihood divided by the option's length)
    config: Mapping[str, Any]  # lm-eval's own keys
    gold: str | None = None  # field with the index of the right option
    options: tuple[str, ...] = ()  # field that lists the options, or one field for each
    change: Callable[[Row], Row] = field(default=lambda row: row)

    def problem(self, row: object) -> str | None:
        """Why a row cannot be used. lm-eval would fill a missing field with '' and score that."""
        if not isinstance(row, dict):
            return "it is not a JSON object"
        for name, kind in self.fields.items():
            # type(), not isinstance: True is an int, and no index
            if type(row.get(name)) is not kind:
                return f"{name!r} must be a {kind.__name__}"
        if self.gold is not None:
            listed = row[self.options[0]]
            count = len(listed) if len(self.options) == 1 else len(self.options)
            if not 0 <= row[self.gold] < count:
                return f"{self.gold!r} is {row[self.gold]} and there are {count} options"
        return None


@dataclass(frozen=True)
class TaskScore:
    metric: str
    value: float
    stderr: float | None
    samples: int
    scores: tuple[float, ...]  # 0 or 1 per sample in file order, for paired comparisons


def _capitalized_fragment(row: Row) -> Row:
    # As lm-eval capitalises ctx_b: here that is the lower-case fragment after the last sentence.
    start = re.compile(r"([.?!] )([a-z])([^.?!]*)$")
    return {**row, "query": start.sub(lambda m: m[1] + m[2].upper() + m[3], row["query"])}


_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
}
_ARC = {**_CHOICE, "doc_to_text": "Question: {{question}}\nAnswer:"}
_ARC_FIELDS = {"question": str, "choices": list, "gold": int}
_ARC_ROW = '{"question": "Which ...?", "choices": ["...", "...", "...", "..."], "gold": 2}'

TASKS: dict[str, TextTask | ZeroShotTask] = {
    "piqa": ZeroShotTask(
        title="PIQA",
        file="piqa_valid.jsonl",
        row='{"goal": "...", "sol1": "...", "sol2": "...", "label": 0}',
        fields={"goal": str, "sol1": str, "sol2": str, "label": int},
        metric="acc_norm",
        gold="label",
        options=("sol1", "sol2"),
        config={
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{goal}}\nAnswer:",
            "doc_to_target": "label",
            "doc_to_choice": "{{[sol1, sol2]}}",
        },
    ),
    "arc_easy": ZeroShotTask(
        title="ARC-easy",
        file="arc_easy_test.jsonl",
        row=_ARC_ROW,
        fields=_ARC_FIELDS,
        metric="acc",
        gold="gold",
        options=("choices",),
        config=_ARC,
    ),
    "arc_challenge": ZeroShotTask(
        title="ARC-challenge",
        file="arc_challenge_test.jsonl",
        row=_ARC_ROW,
        fields=_ARC_FIELDS,
        metric="acc_norm",
        gold="gold",
        options=("choices",),
        config=_ARC,
    ),
    "hellaswag": ZeroShotTask(
        title="HellaSwag",
        file="hellaswag_val.jsonl",
        row='{"query": "Surfing: A man ... he", "choices": ["...", "...", "...", "."], "gold": 3}',
        fields={"query": str, "choices": list, "gold": int},
        metric="acc_norm",
        gold="gold",
        options=("choices",),
        config={**_CHOICE, "doc_to_text": "{{query}}"},
        change=_capitalized_fragment,
    ),
    "winogrande": ZeroShotTask(
        title="WinoGrande",
        file="winogrande_dev.jsonl",
        row='{"context_options": ["... so Tom", "... so Maria"], "continuation": "was", "gold": 1}',
        fields={"context_options": list, "continuation": str, "gold": int},
        metric="acc",
        gold="gold",
        options=("context_options",),
        config={  # the options are contexts: for these lm-eval takes the index as doc_to_text
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_target": "continuation",
            "doc_to_choice": "context_options",
        },
    ),
    "lambada": ZeroShotTask(
        title="LAMBADA",
        file="lambada_openai_test.jsonl",
        row='{"context": "... he lost his", "continuation": "keys"}',
        fields={"context": str, "continuation": str},
        metric="acc",
        config={
            "output_type": "loglikelihood",
            "doc_to_text": "{{context}}",
            "doc_to_target": " {{continuation}}",
        },
    ),
    "wikitext2": TextTask(title="WikiText-2", file="wikitext2_test.raw.txt"),
    "sample": TextTask(title="Sample text", file=None),
}


def task_of(name: str) -> TextTask | ZeroShotTask:
    """One of TASKS, or a text of the user's own, named by its path."""
    return TASKS.get(name) or TextTask(title=Path(name).name, file=name)


def check_names(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in TASKS and not name.endswith(".txt")]
    if unknown:
        raise UserError(
            f"unknown task {', '.join(unknown)}. Tasks: {', '.join(TASKS)}, or a path to a .txt."
        )


def data_file(name: str, data_dir: str | Path | None) -> Path | None:
    """A task's data; None for the text inside the package. Raises if it is missing."""
    task = task_of(name)
    if task.file is None:
        return None
    if name not in TASKS:
        if not Path(name).is_file():
            raise UserError(f"task {name}: there is no such text file.")
        return Path(name)
    looks = (
        f"UTF-8 JSON lines, one object a line, such as {task.row}"
        if isinstance(task, ZeroShotTask)
        else "WikiText-2's wiki.test.raw, unchanged"
    )
    if data_dir is None:
        raise UserError(
            f"task {name}: it reads {task.file} and no data directory was given. "
            f"Pass the directory that holds it (--data-dir). The file is {looks}."
        )
    path = Path(data_dir) / task.file
    if not path.is_file():
        raise UserError(
            f"task {name}: {task.file} is not in the data directory {data_dir}. "
            f"Put it there: {looks}."
        )
    return path


def task_bytes(name: str, data_dir: str | Path | None) -> bytes:
    """The unchanged file, for its hash."""
    path = data_file(name, data_dir)
    if path is not None:
        return path.read_bytes()
    shipped = importlib.resources.files("billfish").joinpath("data", "sample_eval.txt")
    if not shipped.is_file():
        raise UserError(
            "task sample: billfish/data/sample_eval.txt is not in this installation. "
            "Reinstall billfish, or use wikitext2 with a data directory."
        )
    return shipped.read_bytes()


def read_text(name: str, data_dir: str | Path | None) -> str:
    path = data_file(name, data_dir)
    return wikitext_text(path) if path else task_bytes(name, data_dir).decode("utf8")


def read_rows(name: str, data_dir: str | Path | None, limit: int | None = None) -> list[Row]:
    """The first `limit` rows with the fields the task needs and nothing else, each one checked."""
    task, path = TASKS[name], data_file(name, data_dir)
    assert isinstance(task, ZeroShotTask) and path is not None, name
    rows: list[Row] = []
    with path.open(encoding="utf8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if len(rows) == limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                problem = task.problem(row)
            except json.JSONDecodeError as error:
                problem = f"it is not JSON ({error.msg})"
            if problem:
                raise UserError(
                    f"task {name}: {path}, line {number}: {problem}. A row looks like {task.row}"
                )
            rows.append(task.change({key: row[key] for key in task.fields}))
    if not rows:
        raise UserError(f"task {name}: {path} has no rows. A row looks like {task.row}")
    return rows


def check_harness() -> None:
    """Raises unless lm-eval can be imported."""
    _harness()


def run_task(
    model: Any,
    tokenizer: Any,
    name: str,
    data_dir: str | Path | None,
    limit: int | None = None,  # samples from the start of the file
    batch_size: int = 4,
) -> TaskScore:
    """One zero-shot task on a loaded model. May set the tokenizer's pad token, nothing else."""
    task = TASKS[name]
    assert isinstance(task, ZeroShotTask), name
    rows = read_rows(name, data_dir, limit)
    dataset_of, configurable_task, run_harness, hflm, float32 = _harness()
    with _quiet():
        # softmax_dtype: without it a bf16 model is scored in bf16, where close options tie.
        lm = hflm(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=float32
        )
        metrics = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("acc", task.metric)
        ]
        harness_task = configurable_task(
            config={
                **task.config,
                "task": name,
                "test_split": "test",
                "num_fewshot": 0,
                "metric_list": metrics[-1:] if task.metric == "acc" else metrics,
                "custom_dataset": lambda **_: {"test": dataset_of(rows)},
            }
        )
        # bootstrap_iters=0: the standard error of the mean is computed below.
        results = run_harness(lm, {name: harness_task}, bootstrap_iters=0, log_samples=True)
    samples = sorted(results["samples"][name], key=lambda sample: int(sample["doc_id"]))
    scores = tuple(float(sample[task.metric]) for sample in samples)
    assert len(scores) == len(rows), (len(scores), len(rows))
    estimate = mean(scores)
    return TaskScore(task.metric, estimate.value, estimate.stderr, len(scores), scores)


def _harness() -> tuple[Any, Any, Any, Any, Any]:
    try:
        import torch
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"zero-shot tasks run through lm-eval, which cannot be imported ({error}). "
            "Install it: pip install 'billfish[eval]'. Perplexity (wikitext2, sample) needs it not."
        ) from error
    return Dataset.from_list, ConfigurableTask, evaluate, HFLM, torch.float32


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides lm-eval's log, and its progress bars unless stderr is a terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    away = contextlib.nullcontext() if sys.stderr.isatty() else io.StringIO()
    try:
        with away as sink, contextlib.redirect_stderr(sink or sys.stderr):
            yield
    finally:
        logger.setLevel(level)

"""Recognizes an output directory of `quantize` whose job is unfinished."""

from pathlib import Path

JOB = ".billfish"  # directory in the output directory while the job runs
SETTINGS = "job.json"


def unfinished(path: Path) -> str | None:
    if not (path / JOB / SETTINGS).is_file():
        return None
    blocks = len(list((path / JOB).glob("block-*.json")))
    return (
        f"{path}: is an unfinished job of `billfish quantize`, {blocks} of its blocks are done. "
        "Run the same command again: it goes on from there."
    )

"""The command line: arguments in, one call, and its result printed for people or as JSON.

Nothing is computed here. Exit codes: 0 done, 1 an error told in one message, 2 wrong usage, and
what signals.py says of one that was interrupted. Commands import the package's other folders when
they are called, so that --help is quick.
"""

import errno
import sys

import typer

from billfish.cli import bench, checkpoints, experts, kernels, quantize, run, serve, show, signals
from billfish.cli.options import Json
from billfish.errors import Interrupted, UserError

app = typer.Typer(
    name="billfish",
    help="Few-bit LLMs at the speed of memory: quantize any causal LM and run it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def doctor(json_: Json = False) -> None:
    """Say what this machine can do, and what to do about each problem; exit 1 if there is one."""
    from dataclasses import asdict

    from billfish.cli.doctor import diagnose

    findings = [asdict(finding) for finding in diagnose()]
    show.present({"findings": findings}, json_, show.findings)
    if any(finding["status"] == "problem" for finding in findings):
        raise typer.Exit(1)


for name, command, example in (
    ("plan", quantize.plan, "./SmolLM2-135M --group-size 64"),
    ("quantize", quantize.quantize, "./SmolLM2-135M --output ./smol-w4 --group-size 64"),
    ("inspect", checkpoints.inspect, "./smol-w4"),
    ("verify", checkpoints.verify, "./smol-w4"),
    ("convert", checkpoints.convert, "./smol-w4 ./smol-gptq --to gptq"),
    ("eval", run.evaluate, "./smol-w4 --baseline ./SmolLM2-135M --report r.html"),
    ("generate", run.generate, "./smol-w4 --prompt 'What is a billfish?' --chat"),
    ("serve", serve.serve, "./smol-w4 --kv kv8 --api-key SECRET"),
    ("doctor", doctor, "--json"),
):
    app.command(name, epilog=f"Example: billfish {name} {example}")(command)
bench.app.command("experts", epilog=experts.EXAMPLE)(experts.bench_experts)
app.add_typer(bench.app)
app.add_typer(kernels.app)


def main() -> None:
    """Turns expected failures into one message and an exit code."""
    signals.catch()
    try:
        app(standalone_mode=True)
    except UserError as error:
        show.error(str(error))
        sys.exit(1)
    except Interrupted as stopped:
        sys.exit(signals.ended(stopped))
    except OSError as error:
        if error.errno is None or not error.filename:
            raise  # not about a path that the user chose
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room and run the same command again; finished blocks are kept."
        hint = hint if full else "Choose a place that can be read and written."
        show.error(f"{error.filename}: {error.strerror}. {hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command: from its first line on a signal ends it as README says, while it imports, too."""

import sys

from billfish.cli import signals
from billfish.errors import Interrupted


def main() -> None:
    signals.catch()
    try:
        from billfish.cli.app import main as run

        run()
    except Interrupted as stopped:  # while it was imported
        sys.exit(signals.ended(stopped))


if __name__ == "__main__":
    main()

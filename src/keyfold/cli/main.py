"""The entry point. `keyfold --version` answers before anything else is imported."""

import sys

from keyfold import __version__


def main() -> int:
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        print(f"keyfold {__version__}")
        return 0
    if arguments == ["--version", "--json"]:
        print(f'{{"version":"{__version__}"}}')
        return 0
    from keyfold.cli.run import run

    return run(arguments or ["--help"])


if __name__ == "__main__":
    sys.exit(main())

"""`python -m dflash_lab.benchmark`: the command `dflash-lab benchmark` under upstream's name."""

from __future__ import annotations

import sys

from dflash_lab import cli


def main() -> None:
    """Run `dflash-lab benchmark` with this program's arguments."""
    cli.main(["benchmark", *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""`python -m dflash_lab.cli`."""

from dflash_lab.cli import main

main()

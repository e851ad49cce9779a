"""`python -m metashard`, so that torchrun can start the command line: ``torchrun -m metashard load PATH``."""

from metashard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

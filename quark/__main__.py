"""Entry point of ``python -m quark``, and so of ``torchrun -m quark``."""

from quark.cli.main import main

if __name__ == "__main__":
    main()

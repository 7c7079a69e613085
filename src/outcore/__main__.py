"""``python -m outcore`` is the `outcore` command."""

from outcore.cli.main import main

if __name__ == "__main__":
    main()

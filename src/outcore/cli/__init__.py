"""The `outcore` command: thin, one file per command."""

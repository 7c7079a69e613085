"""Eight model families, trained for some steps on this machine."""

"""The event simulator: from a program, its stages and links to a timeline."""

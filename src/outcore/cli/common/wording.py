"""Error messages in the words of the command line.

The package's errors name arguments of functions, because most are raised for callers of those. A command has other
names for the same things, and a message that says what to type next must say what can be typed. So names are replaced
by the command's once, where the message is printed.
"""

from __future__ import annotations

import re

__all__ = ["typed"]

_WORDS: tuple[tuple[str, str], ...] = (
    (r'\bgive (?:memory=|memory_bytes=)"?([\w.]+)"?', r"give --memory \1"),
    (r'\bmemory="([^"]+)"', r"--memory \1"),
    (r"\bmemory(?:_bytes)?=(\d+)", r"--memory \1"),
    (r"\bmemory(?:_bytes)?=", "--memory "),
    (r"\bwith statistics=True\b", "with plan.statistics=true (of outcore train)"),
    (r"\bstatistics=True\b", "plan.statistics=true (of outcore train)"),
    (r"\bbatch_norm (synchronised|deferred|micro_batch)\b", r"plan.batch_norm=\1"),
    (r"\bdevices=(\d+)", r"--devices \1"),
    (r"\bschedule='(\w+)'", r"--schedule \1"),
)


def typed(message: str) -> str:
    """A message with options instead of arguments.

    >>> typed('a step cannot be done within 2.0 MiB; give memory="3MiB" or more')
    'a step cannot be done within 2.0 MiB; give --memory 3MiB or more'
    """
    for argument, option in _WORDS:
        message = re.sub(argument, option, message)
    return message

"""A disk that is full: no file of this process, or of one that it starts, grows beyond some bytes.

Python's own files of byte code are files too. One that is cut off is not noticed when it is written, and every later
process that imports the module ends in "marshal data too short"; so none is written under the limit.
"""

from __future__ import annotations

import os
import resource
import sys

__all__ = ["limit_file_size"]


def limit_file_size(most: int) -> None:
    """Refuse to write beyond so many bytes of any file, until the soft limit is set again."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

"""Writes docs/design/operations.md: every operation that outcore has a name for, and what is known of it where.

python docs/make_operations.py            writes the page
python docs/make_operations.py --check    says whether it is current, and ends with 1 if not
"""

from __future__ import annotations

import sys
from pathlib import Path

from outcore.ops.describe import markdown

PAGE = Path(__file__).parent / "design" / "operations.md"
HEAD = """# Operations

An operation has one record, whatever it is called: a class of `torch.nn`, a function, its in-place form. Which
operations there are stands in `ops/catalogue.py`; what is known of each is a *facet*, which the package that needs it
adds (`ops/registry.py`). An operation without a fact is still trained correctly: what nobody knows is kept or
offloaded, never recomputed, never tiled, and fused by `vmap` or member by member.

```python
print(outcore.ops.describe("grid_sample"))  # all that is known of one
```

To add an operation, add its row to the catalogue; then each kind of knowledge in its one place. A rule is named here
by the module it is in.

"""


def page() -> str:
    """The page as it should be."""
    return HEAD + markdown()


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page() and "docs/design/operations.md is not current")
    PAGE.write_text(page(), encoding="utf-8")

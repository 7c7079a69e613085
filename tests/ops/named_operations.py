"""Which files outside the registry and its rules name operations, and which: ``python -m tests.ops.named_operations``.

A name counts where it is a *value* that something is compared with or looked up by: ``"Conv2d"`` in a set, a
comparison, a table or a string that is split; ``nn.Conv2d`` or ``F.relu`` where it is not called. Calling
``F.relu(x)`` is using an operation, not knowing it. Words that mean something else as often ("mean", "to") do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from outcore.ops import operations

SOURCE = Path(__file__).parents[2] / "src" / "outcore"
RULES = (
    "ops/",
    "stream/rules/",
    "fusion/rules/",
    "memory/chunked_loss/",  # tables of their own, not facets yet
    "planner/memory/row_wise.py",
    "cost/predicted/describe.py",
    "cost/predicted/memory_traffic.py",
    "memory/saved_tensors/layer_functions.py",
    "compiled/times/node_times.py",
    *("compiled/micro_batch/sample_rules.py", "compiled/micro_batch/sample_wise.py"),
    "scan/study/sparsity.py",
    "scan/study/jacobians.py",
)
"""Where operations are named because that is what the file is for."""
OTHERS = (
    *("models/", "bench/"),  # networks
    *("kernels/", "scan/"),  # layers that are written anew
    "keras/",  # layers of another library in terms of torch's
    *("cost/predicted/operation.py", "cost/measured/runnable.py", "cost/measured/op_sweep.py"),  # kinds of work
)
LOOKUPS = ("names", "operation", "kinds", "find", "spatial_dims")
"""Functions of the registry: what is asked by them is not known elsewhere."""
MODULES = ("nn", "F", "torch.nn", "torch.nn.functional")
AMBIGUOUS = set(
    "mean sum max min norm linear to size data type float int bool half double long normal pad t T H all any index "
    "sign round floor view split chunk select where add stack embedding cat clip fold tensor full empty log real "
    "identity repeat flip slice alias positive random_ mod or and mul sub div neg abs exp bfloat16 detach var std "
    "prod roll threshold narrow tile expand gather unfold eq ne lt le gt ge relu tanh lstm gru rnn "
    "zeros ones rand randn arange eye linspace divide "
    "diagonal mm bilinear flatten Fold reshape pow".split()
)


KNOWN = {type_ for op in operations() for type_ in op.types} - AMBIGUOUS | {"RNNBase"}


def named(path: Path) -> Iterator[str]:
    """The operations that a file names."""
    text = path.read_text(encoding="utf-8")
    if KNOWN.isdisjoint(re.findall(r"\w+", text)):
        return
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in parents:
        above = parents.get(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not isinstance(above, ast.Expr):
            if isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id in LOOKUPS:
                continue
            words = node.value.split()
            found = [word for word in words if word in KNOWN]
            if found and len(found) >= 0.6 * len(words):
                yield from found
        elif isinstance(node, ast.Attribute) and node.attr in KNOWN and ast.unparse(node.value) in MODULES:
            called = isinstance(above, ast.Call) and above.func is node
            typed = isinstance(above, ast.arg | ast.AnnAssign | ast.ClassDef | ast.FunctionDef | ast.Attribute)
            if not called and not typed:
                yield node.attr


def by_file() -> dict[str, list[str]]:
    """The files that name operations although they hold no rules, with the names."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE).as_posix()
        if not where.startswith((*RULES, *OTHERS)) and (names := sorted(set(named(path)))):
            found[where] = names
    return found


if __name__ == "__main__":
    for file, names in by_file().items():
        print(f"{file} ({len(names)}): {' '.join(names)}")
    print(f"{len(by_file())} files, {sum(map(len, by_file().values()))} names")

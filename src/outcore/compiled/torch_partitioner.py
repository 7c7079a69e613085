"""The one file that knows torch's private partitioner.

`torch.compile` traces forward and backward into one *joint graph*, and a partitioner decides which of its values the
forward hands to the backward; the backward makes everything else again. Inductor takes a partitioner of the user's by
`torch._inductor.config.custom_partitioner_fn`. Extracting the two graphs from the joint one is full of detail (random
numbers, mutations, collectives, sub-graphs, the order of the backward), differs between versions, and is right in
torch. So only the choice is replaced: `Partitioner` calls torch's own partitioner, with `choose_saved_values_set`
exchanged for ours while it runs in this thread. A graph that cannot be planned (symbolic sizes) has
torch's choice.

What backward may make again: operations of torch itself that neither draw random numbers nor write to their arguments,
and that do not read an input which the forward overwrites, since its old numbers are gone by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from outcore.compiled.head_apart import HeadApart, with_head_apart
from outcore.compiled.offload_graphs import Copies, insert_copies
from outcore.errors import OutcoreError

__all__ = [
    "CompilationError",
    "Partitioner",
    "SavedChoice",
    "TracedStep",
    "compile_planned",
    "compiling",
    "support",
    "without_autograd_cache",
]

_PURE_NAMESPACES = frozenset({"aten", "prims"})
_local = threading.local()
_LIMIT = 256
"""Ways of calling one function that torch.compile keeps, while ours are made."""


class CompilationError(OutcoreError, RuntimeError):
    """A model, or this version of torch, for which there is no compiled plan."""


@dataclass(frozen=True)
class TracedStep:
    """A joint graph as torch's partitioner hands it over, with what each node may be used for."""

    graph: fx.Graph
    inputs: list[fx.Node]
    """What the forward is given: parameters, buffers, arguments, seeds."""
    forward: frozenset[fx.Node]
    """The nodes that the forward's own results need."""
    backward: frozenset[fx.Node]
    """The nodes that need a gradient of a result; whatever is neither is computed where it is needed."""
    fixed: frozenset[fx.Node]
    """Nodes that must not run a second time: backward has them only if they are saved."""
    outputs: list[fx.Node]
    """Results of the forward: the model's, and new contents of what it overwrites."""
    gradients: list[fx.Node]
    """Results of the backward."""
    fusible: frozenset[fx.Node]
    """Nodes that Inductor can compute inside the kernel of their reader."""
    torch_choice: Callable[[float], list[fx.Node]]
    """What torch would save, by its own memory budget from 0 to 1."""
    channels_last: bool = False
    """Whether Inductor gives convolutions their operands with channels last, by copies where they are not."""
    overwrites: bool = False
    """Whether the forward changes what it is given."""


@dataclass(frozen=True)
class SavedChoice:
    """What the forward hands to the backward."""

    saved: list[fx.Node]
    copies: tuple[Copies, ...] = ()
    """Of saved values that leave the device in between."""


def support() -> str | None:
    """Why this version of torch cannot be given a partitioner; none if it can."""
    needed = ("choose_saved_values_set", "min_cut_rematerialization_partition", "get_default_op_list", "NodeInfo")
    missing = [name for name in needed if not hasattr(partitioners, name)]
    if missing or not hasattr(config, "custom_partitioner_fn"):
        return f"torch {torch.__version__} has no {', '.join(missing) or 'custom_partitioner_fn'}"
    return None


class Partitioner(CustomPartitionerFn):
    """Torch's partitioner with our choice of what is saved; what Inductor's configuration takes.

    Args:
        choose: from a joint graph to what is saved.
    """

    def __init__(self, choose: Callable[[TracedStep], SavedChoice]) -> None:
        self.choose = choose

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a joint graph."""
        for node in gm.graph.nodes:
            node.meta.pop("recompute", None)  # of checkpoints: what they mark is planned like the rest
        count: int = kwargs["num_fwd_outputs"]
        _install()
        stack = _local.__dict__.setdefault("stack", [])
        chosen: list[SavedChoice] = []

        def choose(partition: TracedStep) -> list[fx.Node]:
            chosen.append(self.choose(partition))
            return chosen[-1].saved

        stack.append((choose, count))
        try:
            forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        finally:
            stack.pop()
        if chosen and chosen[-1].copies and insert_copies(forward, backward, chosen[-1].copies):
            with contextlib.suppress(AttributeError, ImportError, TypeError):  # faster where it can be told
                _align_reloads()
        return forward, backward

    def uuid(self) -> str:
        """A name for this version of the planner; AOTAutograd's cache, which would not ask it again, is off."""
        return _source_hash()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # torch hashes its configuration by pickling it

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self


def _install() -> None:
    """Put a function in the place of torch's that asks the thread's own choice, and torch's where there is none."""
    theirs = partitioners.choose_saved_values_set
    if getattr(theirs, "_outcore", False):
        return

    def choose_saved_values_set(joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
        stack = getattr(_local, "stack", None)
        if not stack or any(_symbolic(node) for node in joint_graph.nodes):
            return theirs(joint_graph, node_info, memory_budget=memory_budget)
        choose, count = stack[-1]
        return list(choose(_partition(joint_graph, node_info, theirs, count)))

    choose_saved_values_set._outcore = True  # type: ignore[attr-defined]
    partitioners.choose_saved_values_set = choose_saved_values_set


def _align_reloads() -> None:
    """Tell Inductor that what comes back lies at the beginning of a block of memory: what an operation makes of a
    tensor of the host, the ticket, is taken for unaligned else, and the kernels that read it are slower."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    operation: Any = torch.ops.outcore.reload_wait.default
    if operation in lowering.lowerings:
        return
    lowering.make_fallback(operation, warn=False)
    lower: Any = lowering.lowerings[operation]

    def lower_aligned(*args: Any, **kwargs: Any) -> Any:
        result = lower(*args, **kwargs)
        V.graph.unaligned_buffers.discard(result.get_name())
        return result

    lowering.lowerings[operation] = lower_aligned


def _symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def _partition(graph: fx.Graph, info: Any, theirs: Callable[..., list[fx.Node]], count: int) -> TracedStep:
    kinds = partitioners.get_default_op_list()
    overwritten = _overwritten(graph, info.inputs)
    results = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    assert isinstance(results, (list, tuple))
    forward = frozenset(info.required_fw_nodes)
    backward = frozenset(info.tangents_closure)
    fixed: set[fx.Node] = set()
    for node in graph.nodes:  # in the order of computing: an output of what is fixed is fixed
        if node.op == "call_function" and node not in backward and not _repeatable(node, overwritten, fixed):
            fixed.add(node)
    return TracedStep(
        graph=graph,
        inputs=list(info.inputs),
        forward=forward,
        backward=backward,
        fixed=frozenset(fixed),
        outputs=[node for node in results[:count] if isinstance(node, fx.Node)],
        gradients=[node for node in results[count:] if isinstance(node, fx.Node)],
        fusible=frozenset(n for n in graph.nodes if n.op == "call_function" and kinds.is_fusible(n)),
        torch_choice=lambda budget: theirs(graph, info, memory_budget=budget),
        channels_last=_channels_last(graph),
        overwrites=bool(overwritten),
    )


def _channels_last(graph: fx.Graph) -> bool:
    """Whether Inductor will change the layout of convolutions; not, if this version cannot be asked."""
    from torch._inductor.graph import GraphLowering

    ask: Any = getattr(GraphLowering, "decide_layout_opt", None)
    try:
        return ask is not None and bool(ask(SimpleNamespace(graph=graph), is_inference=False))
    except (TypeError, AttributeError, KeyError):
        return False


def _overwritten(graph: fx.Graph, inputs: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The inputs whose contents the forward changes: by a copy in the graph, or after it, as the descriptions of its
    results say."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    found = {node.args[0] for node in calls if node.target is torch.ops.aten.copy_.default}
    results = next(node for node in reversed(graph.nodes) if node.op == "output")
    described = torch.utils._pytree.tree_leaves(results.meta.get("desc"))
    changed = {input_ for one in described if (input_ := getattr(one, "mutated_input", None)) is not None}
    return frozenset(node for node in inputs if node in found or node.meta.get("desc") in changed)


def _repeatable(node: fx.Node, overwritten: frozenset[fx.Node], fixed: set[fx.Node]) -> bool:
    """Whether a node computes the same again in the backward."""
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return False
    if any(source in overwritten for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return node.args[0] not in fixed
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in _PURE_NAMESPACES or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return _draws_nothing(node)
    return True


def _draws_nothing(node: fx.Node) -> bool:
    """Whether an operation that could draw random numbers is told not to: attention without dropout."""
    schema = node.target._schema  # type: ignore[union-attr]
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get(
                argument.name, node.args[place] if place < len(node.args) else argument.default_value
            )
            return bool(given == 0)
    return False


def compile_planned(
    function: Callable[..., Any],
    partitioner: Partitioner,
    *,
    kernels: bool = True,
    head: HeadApart | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`torch.compile` with our partitioner; every shape is compiled for itself.

    Args:
        function: what to compile.
        partitioner: ours.
        kernels: whether Inductor makes kernels; else the two graphs run operation by operation.
        head: the last layer, where it runs apart.
        options: of Inductor.

    Raises:
        CompilationError: this version of torch has no such hook.
    """
    if (why := support()) is not None:
        raise CompilationError(why)
    compiled: Callable[..., Any]
    settings = {"custom_partitioner_fn": partitioner, **options}
    if kernels and head is None:
        compiled = torch.compile(function, dynamic=False, options=settings)
        return compiled
    backend: Any = _inductor(settings) if kernels else _graphs_as_they_are(partitioner)
    if head is not None:
        backend = with_head_apart(backend, head)
    backend.partitioner = partitioner
    compiled = torch.compile(function, dynamic=False, backend=backend)
    return compiled


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A context in which torch.compile asks the partitioner, and keeps as many versions as there are."""
    names = ("recompile_limit", "accumulated_recompile_limit")
    limits = {
        name: max(_LIMIT, getattr(torch._dynamo.config, name)) for name in names if hasattr(torch._dynamo.config, name)
    }
    # Inside DistributedDataParallel the graph is not cut at its buckets: our budget is for the whole.
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(**limits, optimize_ddp=False),
    ):
        yield


@contextlib.contextmanager
def without_autograd_cache() -> Iterator[None]:
    """A context in which torch.compile, should it compile something anew, does not take the graphs of another plan: a
    little of `compiling`, for every step."""
    config: Any = torch._functorch.config
    before = config.enable_autograd_cache
    if not before:
        yield
        return
    config.enable_autograd_cache = False
    try:
        yield
    finally:
        config.enable_autograd_cache = before


def _inductor(settings: dict[str, Any]) -> Any:
    """Inductor as a backend that a graph can be handed to."""
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, config_patches=settings)

    return backend


def _graphs_as_they_are(partitioner: Partitioner) -> Any:
    """A backend of torch.compile that runs the graphs of a partitioner, after Inductor's decompositions."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions ask for it)
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partitioner, decompositions=select_decomp_table)


_HASH: list[str] = []


def _source_hash() -> str:
    """A name for this version of the planner, by which torch's caches tell its results from others."""
    if not _HASH:
        sources = sorted(Path(__file__).parent.rglob("*.py"))
        _HASH.append(hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest())
    return _HASH[0]

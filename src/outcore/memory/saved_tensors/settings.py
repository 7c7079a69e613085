"""What was asked for, and what was made of it for one way of calling a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.memory.cuda_graphs.step_graph import StepGraph
from outcore.memory.replay.compile_policies import CompiledRecording
from outcore.memory.saved_tensors.peak_monitor import MeasuredStep, PeakMonitor
from outcore.memory.saved_tensors.policy_table import PolicyTable
from outcore.planner.memory.buckets import OffloadableParams
from outcore.planner.memory.memory_format import MemoryFormat
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.state_policy import StatePolicy
from outcore.program.policies import Policy


@dataclass(frozen=True)
class Settings:
    """What the user asked of `outcore.within`, as one value."""

    budget_bytes: int | None
    optimizer: OptimizerCost
    reserved_bytes: int = 0
    """To leave free throughout, for what predictions are known to miss."""
    policy: dict[str, Policy] | None = None
    """Chosen by hand."""
    search_s: float = 0.6
    """For each part of a search for policies."""
    graphs: bool = False
    """Run forward and backward as CUDA graphs."""
    states: tuple[StatePolicy, ...] = (StatePolicy(),)
    """Where parameters, gradients and optimizer state may live, the first that meets the budget."""
    offloadable: OffloadableParams | None = None
    """What of the parameters can leave the device."""
    reassociated: bool = False
    """Results may differ from plain training by rounding."""
    fuse: bool = True
    """Then, norms may become one operation with their ReLU."""
    order: MemoryFormat = field(default_factory=MemoryFormat)
    """Of images inside the network."""
    quiet: bool = True
    """Do not say what was measured."""
    beside_bytes: int = 0
    """What the loss holds between forward and backward."""
    loss_by_rows: bool = False
    """Whether that loss treats rows of the output one by one."""
    rounding_bytes: int = 0
    """What an allocator may give too much in all."""
    margin: float = 0.0
    """Share of the budget to leave free beside that."""

    @property
    def replays(self) -> bool:
        """Whether a recording may run in the place of the model's own code: as a CUDA graph, or with calls merged."""
        return self.graphs or self.reassociated

    @property
    def free(self) -> bool:
        """Whether nothing is asked of values: however the model is called, all of them are kept."""
        return self.budget_bytes is None and not (self.policy or self.graphs or self.reassociated)


@dataclass
class PlannedCall:
    """One way of calling the model, ready to run."""

    plan: MemoryPlan
    table: PolicyTable
    compiled: CompiledRecording | None = None
    """The recording with its policies, where it may run in the place of the model's own code."""
    diverged: int = 0
    """Forwards in a row that were not as the plan expects."""
    patience: int = 3
    """So many of them, and what really runs is planned."""
    graphed: StepGraph | None = None
    """Forward and backward as CUDA graphs, where that was asked for and can be."""
    observer: PeakMonitor | None = None
    """Looks at the first steps."""
    measured: MeasuredStep | None = None
    """What it has seen."""
    library_s: float = float("inf")
    """Predicted time of a step in which norms are the library's, where times were measured."""

    def __post_init__(self) -> None:
        self.merged = self.compiled is not None and self.compiled.ahead
        self.idle = not self.plan.policy and not self.merged and self.plan.order.inside is None
        self.idle &= self.plan.chunked is None
        """Whether the model's own forward will do; found once, since resolving policies takes a while."""

"""Start ranks from Python: torchrun's own launcher, called as a function.

    results = outcore.run.launch(train, 4, "plan.json")

runs ``train("plan.json")`` in four processes on this machine and returns what each returned. The function must be
importable (not a lambda), as for any process that is started anew. Ranks that fail are restarted together as often as
`restarts` says; a function that resumes from the last checkpoint then goes on from there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from outcore.errors import EngineError

__all__ = ["launch"]


def launch(function: Callable[..., Any], ranks: int, *args: Any, restarts: int = 0) -> list[Any]:
    """Run a function on so many ranks of this machine; returns what each of them returned.

    Raises:
        EngineError: a rank failed for good; names it, and what it said first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    try:
        found = elastic_launch(config, _call)(function, *args)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        message: Any = failure.message
        said = message.get("message", "") if isinstance(message, dict) else str(message)
        raise EngineError(f"rank {rank} failed: {said or failure.signal_name() or failure.exitcode}") from error
    return [found[rank] for rank in range(ranks)]


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """In a rank: run the function, and leave its exception where the launcher finds it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)(*args)

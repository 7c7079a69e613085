"""What torch itself does to a model: export, tracing, functions that are compiled inside it."""

from __future__ import annotations

import torch
from torch import nn

from .loops import deep
from .run import Run, program, rows


@program
def exported_and_traced(run: Run) -> None:
    model = run.manage(deep(), (rows(0),))
    run.note(torch.export.export(model, (rows(1),)).module()(rows(1)))
    run.note(torch.jit.trace(model, (rows(1),))(rows(2)))
    run.train(model, rows)


@program
def a_compiled_function_inside(run: Run) -> None:
    @torch.compile(backend="eager")
    def wave(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2 + x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(wave(self.first(x))))

    model = run.manage(Model(), (rows(0),))
    run.train(model, rows)

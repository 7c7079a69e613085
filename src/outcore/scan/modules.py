"""`RNN`, `GRU` and `LSTM` of torch.nn whose backward pass is a scan.

They *are* torch.nn's: same constructor, parameters, state_dict, arguments, results, and errors for bad
arguments; only the backward pass differs. Whenever the scan does not apply (nothing to differentiate, or
cuDNN was measured to be faster) the call goes to torch.nn's own forward, and `report` says why.

Not covered: TorchScript, double backward through a module (the functions `linear_recurrence` and `chain` have
it), and under ``torch.compile`` the module behaves like torch.nn's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from outcore.errors import ScanError
from outcore.machine.free_memory import free_bytes
from outcore.scan.arguments import LayerArguments, PackedRows, extent, working
from outcore.scan.cells import CellKind, CellShape
from outcore.scan.choice import RETRY, SHORTEST, choices, key_of
from outcore.scan.kernels import available
from outcore.scan.layer import Layer, run_layer, working_dtype
from outcore.scan.options import Newton, Options, Precision, as_bytes
from outcore.scan.report import LayerReport, Report
from outcore.scan.workspace import BackwardShape, cut

_KINDS: dict[str, CellKind] = {"RNN_TANH": "tanh", "RNN_RELU": "relu", "GRU": "gru", "LSTM": "lstm"}


class _Scanned(torch.nn.RNNBase):
    """What the three modules share."""

    options: Options = Options()
    report: Report | None = None
    """What the last call did; the part about backward is filled in when it runs."""
    _unsettled: int = 0
    _paused: int = 0

    def __init__(self, *args: Any, options: Options | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options or Options()

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch.nn's; see there."""
        tensor = input.data if isinstance(input, PackedSequence) else input
        why_not = self._why_not(tensor, hx)
        if why_not is not None:
            self.report = Report("torch", why_not)
            return super().forward(input, hx)
        self._update_flat_weights()
        if self.report is not None and any(_ran_on(layer) for layer in self.report.layers):
            self._paused = RETRY
        backward, reason = self._choose(input, hx)
        if backward == "torch":
            self.report = Report("torch", reason)
            return super().forward(input, hx)
        given = LayerArguments.of(self, input, hx)
        self.report = Report("scan", reason)
        return given.results(self, *self._layers(given.x, given.packing, given.state, *extent(self, input)))

    def _why_not(self, tensor: Tensor, hx: Any) -> str | None:
        """Why this call has no use for a scan; None if it may have."""
        if self.options.backward == "torch":
            return "asked for"
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
            return "no scan inside torch.compile or on tensors without data"
        if self.options.forward is None:
            parts = [tensor, *self.parameters(), *(hx if isinstance(hx, tuple) else (hx,))]
            if not torch.is_grad_enabled() or not any(isinstance(p, Tensor) and p.requires_grad for p in parts):
                return "nothing to differentiate"
        if torch.is_autocast_enabled(tensor.device.type) and tensor.device.type != "cuda":
            return f"no scan under autocast on {tensor.device.type}"
        return None

    def _choose(self, input: Any, hx: Any) -> tuple[str, str]:
        """Which backward pass, and why; with as little work as possible, because where torch's is taken that is all the
        overhead."""
        if self.options.backward == "scan" or self.options.forward is not None:
            return "scan", "asked for"
        steps, batch = extent(self, input)
        if steps < SHORTEST:
            return "torch", f"{steps} steps; a scan needs at least {SHORTEST} to pay"
        tensor = input.data if isinstance(input, PackedSequence) else input
        key = key_of(self._cell(0), 1 + self.bidirectional, steps, batch, tensor.device, working(tensor))
        if key not in choices.timings:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return "torch", "nothing can be measured while a CUDA graph is recorded; run the layer once before"
            given = LayerArguments.of(self, input, hx)
            self._measure(key, (given.x if given.packing is None else given.packing.pad(given.x)).detach())
        return choices.timings[key].choose(self._settled())

    def _settled(self) -> bool:
        """Whether the last scanned call needed no products; forgotten after a while."""
        layers = [] if self.report is None else self.report.layers
        if any(outcome.known and outcome.gave_up for layer in layers for outcome in layer.outcomes):
            self._unsettled = RETRY
        self._unsettled = max(0, self._unsettled - 1)
        return self._unsettled == 0

    def _measure(self, key: str, x: Tensor) -> None:
        def run(module: torch.nn.Module) -> Callable[[], None]:
            def once() -> None:
                with torch.enable_grad():
                    output, _ = module(x)
                    torch.autograd.grad(output, list(module.parameters()), output.detach())

            return once

        scanned = run(self._first_layer(replace(self.options, backward="scan")))
        products = run(self._first_layer(replace(self.options, backward="scan", solver="products")))
        choices.measure(key, scanned, products, run(self._first_layer(None)), x.device)

    def _first_layer(self, options: Options | None) -> torch.nn.Module:
        """A copy of the first layer only, as torch.nn's or, with options, as ours."""
        bases = {
            "RNN_TANH": torch.nn.RNN,
            "RNN_RELU": torch.nn.RNN,
            "GRU": torch.nn.GRU,
            "LSTM": torch.nn.LSTM,
        }
        extra: dict[str, Any] = {"nonlinearity": self.mode[4:].lower()} if self.mode.startswith("RNN") else {}
        if self.proj_size:
            extra["proj_size"] = self.proj_size
        first = self._flat_weights[0]
        assert first is not None
        layer: torch.nn.Module = bases[self.mode](
            self.input_size, self.hidden_size, bias=self.bias, bidirectional=self.bidirectional, **extra,
            device="meta",
        ).to_empty(device=first.device).to(first.dtype)  # fmt: skip
        state = self.state_dict()
        layer.load_state_dict({name: state[name] for name in layer.state_dict()})
        return layer if options is None else convert(layer, options=options)

    def _cell(self, layer: int) -> CellShape:
        size = self.input_size if layer == 0 else (self.proj_size or self.hidden_size) * (1 + self.bidirectional)
        return CellShape(_KINDS[self.mode], size, self.hidden_size, self.proj_size)

    def _layers(
        self, x: Tensor, packing: PackedRows | None, state: tuple[Tensor, ...], steps: int, batch: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert self.report is not None
        D = 1 + self.bidirectional
        per = len(self._flat_weights) // (self.num_layers * D)
        limit = None if self.options.memory is None else as_bytes(self.options.memory)
        copied = D == 2 or packing is not None or x.dtype.itemsize < 4
        newton = self._newton()
        layers = []
        for i in range(self.num_layers):
            shape = BackwardShape(self._cell(i), D, steps, batch, max(4, x.dtype.itemsize), copied, x.is_cuda)
            fused = available.available(x) and available.fits(shape.cell, working_dtype(x.dtype))
            plan = cut(shape, limit, self.options.chunk, fused=fused)
            if limit is None and plan.bytes > _always_free(x.device):  # asking the driver takes as long as a layer
                plan = cut(shape, free_bytes(x.device) // 4, self.options.chunk, fused=fused)
            report = LayerReport(plan.segment, plan.chunk, plan.bytes)
            self.report.layers.append(report)
            layers.append(
                Layer(
                    cell=shape.cell,
                    bias=self.bias,
                    directions=D,
                    packing=packing,
                    cut=plan,
                    solver=self.options.solver,
                    precision=_precision(self.options.precision, x),
                    forward=newton,
                    report=report,
                )
            )
        finals = []
        for i, layer in enumerate(layers):
            flat = [w.to(working(w)) for w in self._flat_weights[i * D * per : (i + 1) * D * per] if w is not None]
            with torch.autocast(x.device.type, enabled=False):
                x, *final = run_layer(layer, x, tuple(s[i * D : (i + 1) * D] for s in state), flat)
            finals.append(final)
            if self.dropout and self.training and i < self.num_layers - 1:
                x = F.dropout(x, self.dropout)
        if any(layer.report.failure for layer in layers):
            self._paused = RETRY
        return x, tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*finals, strict=True))

    def _newton(self) -> Newton | None:
        """The parallel forward pass, unless it failed a short while ago."""
        if self.options.forward is None or self._paused == 0:
            return self.options.forward
        assert self.report is not None
        self._paused -= 1
        self.report.reason += f"; the parallel forward pass failed and is tried again in {self._paused + 1} calls"
        return None


@functools.cache
def _always_free(device: torch.device) -> int:
    """Bytes that are allocated without asking how many are free: few beside what the device has."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(2**26, total // 64)


def _ran_on(layer: LayerReport) -> bool:
    """Whether a parallel forward pass is already known to have ended in a sequential one."""
    return layer.forward is not None and layer.forward.known and layer.forward.solver == "sequential"


def _precision(asked: Precision | None, x: Tensor) -> Precision:
    if asked is not None:
        return asked
    return "full" if torch.get_float32_matmul_precision() == "highest" or x.dtype == torch.float64 else "tf32"


class RNN(_Scanned, torch.nn.RNN):
    """`torch.nn.RNN` with a backward pass in parallel over time.

    >>> rnn = RNN(8, 20, options=Options(backward="scan"))
    >>> output, state = rnn(torch.randn(1000, 16, 8))
    >>> output.sum().backward()

    Args:
        *args: as torch.nn.RNN's.
        options: how to scan; none: whatever is fastest here.
        **kwargs: as torch.nn.RNN's.
    """


class GRU(_Scanned, torch.nn.GRU):
    """`torch.nn.GRU` with a backward pass in parallel over time; see `RNN`."""


class LSTM(_Scanned, torch.nn.LSTM):
    """`torch.nn.LSTM` with a backward pass in parallel over time; see `RNN`."""


_Module = TypeVar("_Module", bound=torch.nn.Module)
_CLASSES: dict[type[torch.nn.Module], type[_Scanned]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
}


def convert(model: _Module, *, options: Options | None = None) -> _Module:
    """Give the recurrent layers inside a model a scanned backward pass, in place; parameters and names stay.

    >>> model = convert(torch.nn.Sequential(torch.nn.GRU(4, 8)))
    >>> type(model[0]).__module__
    'outcore.scan.modules'

    Raises:
        ScanError: there is no RNN, GRU or LSTM of torch.nn in it.
    """
    found = [module for module in model.modules() if type(module) in _CLASSES or isinstance(module, _Scanned)]
    if not found:
        raise ScanError(f"{type(model).__name__} has no torch.nn.RNN, GRU or LSTM inside; nothing to convert")
    for module in found:
        if not isinstance(module, _Scanned):
            module.__class__ = _CLASSES[type(module)]
        module.options = options or Options()  # type: ignore[assignment]
    return model

"""Back-propagation as a parallel scan over time (BPPSA), and the forward pass by Newton's method.

RNN, GRU, LSTM       torch.nn's, with a backward pass in parallel over time
convert              the same for the layers of a given model, in place
Options, Newton      how they run
choices              what was measured to be faster, scan or torch, per shape
linear_recurrence    h_t = a_t h_{t-1} + b_t, real or complex
chain                gradients along a chain of Jacobians
analyse              whether a scan could pay for a captured network
"""

from outcore.scan.choice import choices
from outcore.scan.linear import linear_recurrence
from outcore.scan.modules import GRU, LSTM, RNN, convert
from outcore.scan.options import Newton, Options
from outcore.scan.report import LayerReport, Report
from outcore.scan.study.analyse import Analysis, analyse
from outcore.scan.study.jacobian_scan import chain
from outcore.scan.study.jacobians import jacobian_of

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Analysis",
    "LayerReport",
    "Newton",
    "Options",
    "Report",
    "analyse",
    "chain",
    "choices",
    "convert",
    "jacobian_of",
    "linear_recurrence",
]

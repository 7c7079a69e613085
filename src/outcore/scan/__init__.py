"""Back-propagation as a parallel scan (BPPSA), and the forward pass too."""

from outcore.scan.linear import linear_recurrence
from outcore.scan.modules import GRU, LSTM, RNN, convert
from outcore.scan.options import Newton, Options

__all__ = ["GRU", "LSTM", "RNN", "Newton", "Options", "convert", "linear_recurrence"]

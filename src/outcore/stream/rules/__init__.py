"""How each operation is computed region by region; importing this registers all of them."""

from outcore.stream.rules import arrange as arrange
from outcore.stream.rules import convolve as convolve
from outcore.stream.rules import normalise as normalise
from outcore.stream.rules import pieces as pieces
from outcore.stream.rules import pointwise as pointwise
from outcore.stream.rules import pool as pool
from outcore.stream.rules import reduce as reduce
from outcore.stream.rules import resample as resample
from outcore.stream.rules import unpool as unpool

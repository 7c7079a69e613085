"""Exact tile streaming: images too large to hold, forward and backward, tile by tile."""

from outcore.stream.conductor import pixel_loss as pixel_loss
from outcore.stream.dense import PixelLoss as PixelLoss
from outcore.stream.planning import StreamPlan as StreamPlan
from outcore.stream.planning import plan_tiles as plan_tiles
from outcore.stream.source import FunctionSource as FunctionSource
from outcore.stream.streamed import Streamed as Streamed
from outcore.stream.streamed import stream as stream

"""Exact tile streaming: images too large to hold, forward and backward, tile by tile."""

from outcore.stream.execute.pixel_loss import PixelLoss as PixelLoss
from outcore.stream.managed_forward import pixel_loss as pixel_loss
from outcore.stream.plan.plan import StreamPlan as StreamPlan
from outcore.stream.plan.plan import plan_tiles as plan_tiles
from outcore.stream.source import FunctionSource as FunctionSource
from outcore.stream.streamed import Streamed as Streamed
from outcore.stream.streamed import stream as stream

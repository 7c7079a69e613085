"""Slides, volumes and other inputs too large to hold: opened lazily, read by region, made up for tests."""

from outcore.data.source import ArraySource as ArraySource
from outcore.data.source import Batch as Batch
from outcore.data.source import DataError as DataError
from outcore.data.source import Region as Region
from outcore.data.source import Source as Source

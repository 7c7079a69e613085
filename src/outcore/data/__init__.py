"""Slides, volumes and other inputs too large to hold: opened lazily, read by region, made up for tests."""

from outcore.data.cache import tile_cache as tile_cache
from outcore.data.opening import open_slide as open_slide
from outcore.data.scene import Scene as Scene
from outcore.data.slide import DamagedTile as DamagedTile
from outcore.data.slide import Slide as Slide
from outcore.data.source import ArraySource as ArraySource
from outcore.data.source import Batch as Batch
from outcore.data.source import Region as Region
from outcore.data.source import Source as Source
from outcore.data.table import Example as Example
from outcore.data.table import SlideTable as SlideTable
from outcore.data.table import read_folder as read_folder
from outcore.data.table import read_table as read_table
from outcore.data.writing import write_slide as write_slide
from outcore.data.writing import write_slides as write_slides
from outcore.data.writing import write_volume as write_volume
from outcore.errors import DataError as DataError

"""The page on which a network, its costs and its plans are looked at; and the same facts in an editor."""

from outcore.explore.page import explore_page as explore_page
from outcore.explore.parts import ExploreSettings as ExploreSettings
from outcore.explore.parts import explore_bundle as explore_bundle

"""Figures with controls: ipywidgets around the pure functions of `viz` and the real scheduler."""

from cbserve.explorers.page_map_explorer import PageMapExplorer, page_map_explorer
from cbserve.explorers.timeline_explorer import TimelineExplorer, timeline_explorer

__all__ = ["PageMapExplorer", "TimelineExplorer", "page_map_explorer", "timeline_explorer"]

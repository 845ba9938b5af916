"""Figures with controls: ipywidgets around the pure functions of `viz` and the real scheduler."""

from cbserve.explorers.page_map_explorer import PageMapExplorer, page_map_explorer
from cbserve.explorers.pareto_explorer import ParetoExplorer, pareto_explorer
from cbserve.explorers.pitfall_scenes import cold_start_scene, long_prefill_scene
from cbserve.explorers.scene import Scene
from cbserve.explorers.setting import Setting
from cbserve.explorers.timeline_explorer import TimelineExplorer, timeline_explorer

__all__ = [
    "PageMapExplorer",
    "ParetoExplorer",
    "Scene",
    "Setting",
    "TimelineExplorer",
    "cold_start_scene",
    "long_prefill_scene",
    "page_map_explorer",
    "pareto_explorer",
    "timeline_explorer",
]

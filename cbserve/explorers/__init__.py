"""Figures with controls: ipywidgets around the pure functions of `viz` and the real scheduler."""

from cbserve.explorers.timeline_explorer import TimelineExplorer, timeline_explorer

__all__ = ["TimelineExplorer", "timeline_explorer"]

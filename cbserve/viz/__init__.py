"""Pure functions from a trace, or plain numbers, to figures and tables."""

from cbserve.viz.bars import bars
from cbserve.viz.figure import Figure
from cbserve.viz.histogram import histogram
from cbserve.viz.lines import lines
from cbserve.viz.page_map import page_map
from cbserve.viz.table import Table, table
from cbserve.viz.text import timeline_text
from cbserve.viz.timeline import timeline

__all__ = ["Figure", "Table", "bars", "histogram", "lines", "page_map", "table", "timeline", "timeline_text"]

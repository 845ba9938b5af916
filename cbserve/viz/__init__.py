"""Pure functions from a trace, or plain numbers, to figures and tables."""

from cbserve.viz.figure import Figure
from cbserve.viz.table import Table, table
from cbserve.viz.timeline import timeline

__all__ = ["Figure", "Table", "table", "timeline"]

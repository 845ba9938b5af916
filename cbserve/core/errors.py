"""Errors of the core: what a request, a pool or a scheduler may refuse."""

from cbserve.errors import CBServeError


class InvalidRequestError(CBServeError, ValueError):
    """A request or a sampling parameter is out of range: refused when it is made or added."""


class NoFreeBlocksError(CBServeError):
    """More blocks were asked for than are free. Nothing was changed."""


class SchedulerError(CBServeError):
    """A duty of the scheduler took a decision that cannot be carried out."""


class ConservationError(CBServeError):
    """Blocks were leaked, freed twice or counted wrongly."""

"""Every error raised on purpose derives from `CBServeError` and names the value, the limit and the cure."""


class CBServeError(Exception):
    """Base of all errors raised on purpose."""


class ModelError(CBServeError):
    """A model, its files or its tokenizer cannot be used as asked."""


class FigureError(CBServeError, ValueError):
    """A picture or a table cannot be drawn from what was given."""

"""Every error that cbserve raises on purpose derives from `CBServeError` and names the value, the limit and the cure."""


class CBServeError(Exception):
    """Base of all errors raised on purpose."""

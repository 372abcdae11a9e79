"""Errors of bad input: who, what was expected, what came."""


class InputError(ValueError):
    """Something that was given cannot be used; one sentence for the person who gave it."""


class UploadError(InputError):
    """An upload, a file or a set of clients that cannot be used; one sentence for the person who sent it."""

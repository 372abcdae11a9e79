"""The one error of bad input: who, what was expected, what came."""


class UploadError(ValueError):
    """An upload, a file or a set of clients that cannot be used, in one sentence for the person who sent it."""

"""Every exception this folder raises on purpose."""


class ImagesError(Exception):
    """Base class of every error raised on purpose; its message is for the user."""


class FontError(ImagesError):
    """A font is missing, cannot be read, or lacks a character."""

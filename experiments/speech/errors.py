"""Every exception this folder raises on purpose."""


class SpeechError(Exception):
    """Base class of every error raised on purpose; its message is for the user."""


class MissingExtraError(SpeechError):
    """The wheel that carries the synthesiser is not installed."""


class SessionError(SpeechError):
    """A recording session raised, was killed, or ran past its time."""

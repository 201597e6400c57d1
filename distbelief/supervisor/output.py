"""What the supervisor does about one event: its actions in order, and its messages to the user."""

from collections import deque
from typing import final

from distbelief.protocol import Message as WireMessage
from distbelief.protocol.log_events import LogEvent
from distbelief.protocol.role import Action, Address, Report, Seconds, Send
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.view import MESSAGES_MAX, Message


@final
class Output:
    """Collects the actions of all parts of the supervisor."""

    def __init__(self, metrics: JobMetrics) -> None:
        self._metrics = metrics
        self._n_messages = 0
        self.messages: deque[Message] = deque(maxlen=MESSAGES_MAX)
        self.now: Seconds = 0.0
        self.actions: list[Action] = []

    def begin(self, now: Seconds) -> None:
        """Begin a new event; what an event that raised has left is dropped."""
        self.now, self.actions = now, []

    def add(self, *actions: Action) -> None:
        self.actions += actions

    def send(self, receiver: Address, *messages: WireMessage | None) -> None:
        """Send messages; None is no message."""
        self.actions += [Send(receiver=receiver, message=m) for m in messages if m is not None]

    def log(self, event: LogEvent) -> None:
        """Log an event, and store it as a message to the user."""
        report = Report.of(event)
        self.actions.append(report)
        self._n_messages += 1
        self.messages.append(
            Message(
                number=self._n_messages,
                seconds=self._metrics.seconds(self.now),
                text=report.text,
                level=event.level,
                what=event.what,
            )
        )

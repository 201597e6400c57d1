"""Terminal output of a job: the live screen, or plain lines."""

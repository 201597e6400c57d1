"""What the terminal shows of a job: the live screen, or plain lines."""

"""The contract of a role (events in, actions out), and reliable streams between roles."""

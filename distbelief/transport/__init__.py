"""The real side of the seam: ZeroMQ, memory shared by processes, threads, timers."""

"""ZeroMQ, encryption, keys and shared memory: the only package with sockets."""

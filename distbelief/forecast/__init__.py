"""A job in virtual time: what it would do on a cluster, and what breaking it does."""

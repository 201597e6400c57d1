"""The processes of roles on this machine: forked, tried out, ended."""

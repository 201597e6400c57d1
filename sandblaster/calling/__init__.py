"""What `minimize` is given, made ready for other processes; and what it returns."""

"""What `simulation.py` measures."""

"""What `sandblaster.py` measures."""

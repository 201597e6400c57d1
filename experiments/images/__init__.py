"""Locally connected networks for images, of the size of the paper's."""

"""A job of one's own in a page: scikit-learn's handwritten digits."""

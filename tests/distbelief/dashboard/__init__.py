"""The page, over plain HTTP and in a browser."""

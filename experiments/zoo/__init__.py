"""Models of public libraries, split: which are accepted, how well, and whether results agree."""

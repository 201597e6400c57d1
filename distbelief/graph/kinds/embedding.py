"""Embeddings: the row of a table for each word.

    kind      "embedding"
    inputs    words, whole numbers: (*positions); () for one per sample
    tensors   weight (words, size)
    options   padding: the word whose row gets no gradient, or None

Output (*positions, size), cut by positions and by columns of the table.
"""

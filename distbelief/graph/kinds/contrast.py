"""Local contrast normalisation: each place against the maps around it.

    kind      "local_contrast"
    inputs    (maps, rows, columns)
    options   size: of the square window, odd; epsilon: the constant c below

    g = x - mean of x in the window, over all maps                      (subtractive)
    y = g / max(c, sqrt(mean of g^2 in the window, over all maps))      (divisive)

Means are weighted by a Gaussian of deviation size / 4 whose weights sum to one over the
window and all maps; at borders the weights of the places inside the image are
scaled to sum to one, so that a constant image gives zero everywhere. A part needs all maps
and a halo of twice the window's radius. The module is
`LocalContrastNorm2d(size=9, *, epsilon=0.01)`.
Source: Jarrett et al. 2009, "What is the best multi-stage architecture for object
recognition?", section 2.1; with the constant c of Le et al. 2012, section 3.2 (theirs
is the mean deviation of the image otherwise), and scaled borders, which both leave open.
"""

"""Another shape for the same elements in the same order: flatten, view, unflatten.

    kind      "reshape"
    inputs    x
    options   none: the shapes say it all

Dimensions are matched up in blocks with equal numbers of elements:

    (16, 5, 5, 3) -> (400, 3)        blocks 16 5 5 -> 400, 3 -> 3

Cuts of a block lie where both sides have a box: of 400 at multiples of 25, of
400 -> (16, 25) in the first dimension only. Any other region works too, but reads the
smallest box that holds what it needs.
"""

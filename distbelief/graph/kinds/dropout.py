"""Dropout whose mask depends on nothing but where an element is, and the step.

    kind      "dropout"
    inputs    x
    options   probability: of being dropped, 0 to 1
              n_shared: trailing dimensions whose elements share their fate (Dropout1d:
              1, Dropout2d: 2, Dropout3d: 3); 0 for plain dropout

Kept elements are divided by 1 - probability; outside of training steps nothing happens.
The mask is a hash of (step's seed, layer's name, sample's index, element's index), so any
split, and any range of samples, sees the same one.
"""

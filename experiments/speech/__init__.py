"""Synthetic speech of the shape of the paper's acoustic task (section 5 of Dean 2012).

A formant synthesiser reads the interpreter's own documentation aloud, in many voices,
rooms and noises; a network names the phone state of every 10 ms frame. It has the
shape of the paper's task, not its data: accuracies do not compare with the paper's.

Dean 2012 is "Large Scale Distributed Deep Networks", NIPS 25.
"""

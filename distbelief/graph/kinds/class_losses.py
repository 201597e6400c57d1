"""Cross-entropy of classes that may be split over machines.

    kind      "class_sums": what the loss needs of the scores, as partial sums
    inputs    scores, labels (whole numbers, without dim `dim`; or probabilities of the
              scores' shape), maximum of the scores over `dim`, kept with extent 1
    options   dim; smoothing; soft: whether labels are probabilities
    output    the scores' shape with extent 3 in `dim`: sum of exp(s), of q s, of q,
              where s = score - maximum, and q is the label's distribution

    kind      "cross_entropy"
    inputs    class sums, labels
    options   dim; ignore: the label that counts for nothing; mean: over the labels that
              count, or the sum over positions; soft
    output    () per sample; the loss of the batch is the mean of it over samples

    cross_entropy_layers(name, scores, labels, *, dim=0, smoothing=0.0, ignore=-100,
                         mean=True, normalised=False)

With `normalised` the scores are logarithms of probabilities: torch's nll_loss. As in
torch the mean is over all labels of the batch that count: each sample's loss carries
the factor (samples * positions) / (labels that count), so that the mean over samples is
torch's. No label that counts: the loss is 0 (torch: nan).
"""

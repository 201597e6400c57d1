"""The parameter server without a job, for `DownpourSGD` and `distbelief serve`."""

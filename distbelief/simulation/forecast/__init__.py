"""Forecasts: speed and progress of a job on a cluster, by simulating the job."""

"""Your own training loop (`DownpourSGD`, `Exchange`) and its parameter server, without a job."""

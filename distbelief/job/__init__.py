"""One job, prepared, run and finished: hosts, processes, files and screen."""

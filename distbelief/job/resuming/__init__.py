"""Going on with a run, on other numbers of shards and replicas too."""

"""Scheduled model parallelism, after STRADS (Kim et al., EuroSys 2016)."""

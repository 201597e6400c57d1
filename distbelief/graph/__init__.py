"""Layer graphs: captured from torch modules, with a rule for each operator to be split."""

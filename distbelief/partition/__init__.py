"""How to split a model: candidates, their costs, the best choice and its proof."""

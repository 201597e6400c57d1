"""Jobs broken on purpose: a schedule of blows, and what came of them."""

"""What is told of plans: tables, explanations, differences, pictures."""

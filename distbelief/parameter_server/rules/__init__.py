"""What a shard does with gradients: update rules, schedules, each element's clock."""

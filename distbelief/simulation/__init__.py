"""The seeded network: any number of roles in one process, on a virtual clock."""

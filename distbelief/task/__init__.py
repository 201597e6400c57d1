"""What is trained: the model, the data and the loss of a job, and their checks."""

"""The supervisor: who belongs to a job, who lives, when it ends."""

"""Machines that join a job: what they offer, what runs where, and who leaves."""

"""Every decoder, on bytes that nobody in his right mind would send.

    python -m experiments.fuzz [NAME ...] [--executions 1e7] [--keep FOLDER]

See `command` for what it prints, `decoders` for what there is.
"""

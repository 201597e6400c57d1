"""Imports all that commands need, in the process that they are forked from, and freezes it.

Otherwise each of their garbage collections would look at all of torch, and copy the pages
that it is on.
"""

from distbelief.job.launch import forkserver
from tests.processes.nursery import IMPORTED


forkserver.import_frozen(IMPORTED)

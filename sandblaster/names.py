"""What the roles of Sandblaster are called."""

from typing import Final

from distbelief.roles import Address


COORDINATOR: Final = Address("coordinator")

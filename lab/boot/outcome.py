"""How a run can end before its scenario has an opinion."""


class Missing(Exception):
    """Something that the scenario needs is not on this machine: skipped, exit 77, with one line that names it."""


class Failed(Exception):
    """The scenario or its kernel did not do what it should: exit 1."""


class Died(Exception):
    """The kernel ended before the scenario began, or its emulator failed. The run may be started again."""

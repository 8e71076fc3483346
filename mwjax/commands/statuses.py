"""Exit statuses of the command line."""

DONE = 0
SOME_REFUSED = 1  # done, but some input was refused, or did not pass
UNUSABLE = 2  # wrong usage, or nothing usable
DEFECT = 70  # of mwjax itself

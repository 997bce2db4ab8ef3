"""Settings for all tests."""

from hypothesis import settings

# The same examples each time, and no deadline: the first call of an operation is slow.
settings.register_profile("hess", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("hess")

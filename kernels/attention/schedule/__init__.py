"""Device functions that say which rows of which sequence a program works on; see triton.py."""

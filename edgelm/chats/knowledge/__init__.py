"""Knowledge: files that the user names, split into passages, the best of which stand before a question.

Everything happens in this process and on this disk. Knows nothing of models, endpoints and screens.
"""

GUIDE = "edgelm:guide"  # a root that stands for the built-in guide

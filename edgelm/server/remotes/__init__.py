"""Models that other servers run: where, and how a request of any dialect becomes one of theirs."""
